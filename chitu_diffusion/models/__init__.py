"""The models: what each needs and how it is called, loading from a folder, generating on one rank or several.

Start at `registry` (which models there are), then `pipeline` (load and generate) and `sharing` (several ranks).
"""
