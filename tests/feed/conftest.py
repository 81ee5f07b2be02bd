"""Here so that pytest finds the helpers beside this file from the folders below it, too."""
