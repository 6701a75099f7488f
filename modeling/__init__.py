"""torch, shared by the services and the trainer: loading, scoring, images, fingerprints.

load.py           Hugging Face model -> LoadedModel; save_model, load_weights
adapters.py       LoRA: add, load, save, merge an adapter
groups.py         TokenGroup: a prompt once, with its responses
prefix.py         prefill: prompts through the model once
shared_prefix.py  group_logprobs (the teacher's path) and plain_logprobs (its reference)
packed.py         packed_scores: several groups in a row (the trainer's path)
padded.py         padded_scores: a sequence a row, for architectures that admit no other
sharing.py        does this model's path agree with the plain forward?
logprobs.py       selected_logprobs: log-softmax at chosen ids, by chunks
head.py           hidden state -> logits as the model itself does it
images.py         decode, pixels, features, expand_placeholders; image_limits.py: what is taken
probe.py          proof that published weights arrived
fingerprint.py    hashes; card.py: describe_model; compat.py: check_compatible
engine_errors.py  what a bad item can make modelling code raise
"""
