"""torch, shared by the services and the trainer: loading, scoring, images, fingerprints.

load.py           Hugging Face model -> LoadedModel; save_model, load_weights
groups.py         TokenGroup: a prompt once, with its responses
prefix.py         prefill: prompts through the model once
shared_prefix.py  group_logprobs (the fast path) and plain_logprobs (its reference)
sharing.py        check_sharing: may this model take the fast path?
logprobs.py       selected_logprobs: log-softmax at chosen ids, by chunks
head.py           hidden state -> logits as the model itself does it
images.py         decode, pixels, features, expand_placeholders
fingerprint.py    hashes; card.py: describe_model; compat.py: check_compatible
"""
