"""``onward launch``: one script in several processes of this machine."""
