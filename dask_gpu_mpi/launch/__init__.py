"""The command ``launch``: where this process is, which launcher starts the ranks there and how, and the run itself."""
