"""What is saved of a model and how it comes back, without pickle unless the user says so."""
