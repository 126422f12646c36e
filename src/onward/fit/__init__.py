"""A step becomes a trained model: Session, Model, Evaluator, Trainer, the training loop."""
