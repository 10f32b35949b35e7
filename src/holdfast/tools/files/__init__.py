"""Tools for the files of a workspace, and the folders and files that no tool may reach."""
