"""Forward and backward pass in a low dtype, by the roles of ops, and the scale of the loss."""
