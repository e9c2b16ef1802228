"""The command line `c2kv`: sits on top of everything else."""
