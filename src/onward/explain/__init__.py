"""A Program becomes what a person wants to know: costs, pictures, differences, faults."""
