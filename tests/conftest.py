"""Before any test computes: bfloat16 without AMX on a processor that announces AMX but cannot run it."""

from fasterqk.processor import avoid_faulty_amx

# In every process of pytest. Workers inherit the variable, and without one they read the cached answer.
avoid_faulty_amx()
