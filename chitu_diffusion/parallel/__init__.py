"""How the ranks of a job are divided: CFG lanes and context-parallel groups."""
