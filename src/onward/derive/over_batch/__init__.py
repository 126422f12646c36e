"""What a part of a batch tells of the whole: how every value of a traced function follows the batch."""
