"""The update pass: which rule updates which parameter, in which dtypes, by which ops."""
