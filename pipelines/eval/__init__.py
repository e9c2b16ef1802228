"""Evaluation: the same questions over full compute, slots and the rows they are compared with (DESIGN 8)."""
