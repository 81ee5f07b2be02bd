"""The Params of the estimators, a file a subject."""
