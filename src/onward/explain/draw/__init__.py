"""A Program becomes a picture: what is drawn, where it stands, and the forms a picture takes."""
