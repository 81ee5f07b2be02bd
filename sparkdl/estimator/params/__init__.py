"""The Params of the estimators, a file for each group of ``TorchEstimator``'s arguments."""
