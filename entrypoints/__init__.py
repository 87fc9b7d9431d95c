"""What people touch: the Python API, the command line, batch files."""
