"""Our code beside a plain implementation, timed in one process; one module per `fasterqk-lab bench NAME`."""
