"""Command line: parse arguments, call the right part, print, choose the exit code."""
