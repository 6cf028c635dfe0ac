"""The paper's toy language, its four parameterizations, and an engine that trains them fast."""
