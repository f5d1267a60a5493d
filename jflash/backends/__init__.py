"""The implementations of attention; README.md beside this file says how to add one."""
