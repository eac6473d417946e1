"""What the commands do: ``run`` in the file of each one's name, which is imported when it runs."""
