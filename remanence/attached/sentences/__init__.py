"""A memory of sentences for a pretrained model: the sentences of a text are stored with learned keys, and those that a
question finds are put into the context before the answer.
"""
