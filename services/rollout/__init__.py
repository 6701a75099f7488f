"""The rollout worker: writes the student's responses to the trainer's prompts.

settings.py  what can be set               worker.py       claim, write, hand in
admission.py which tasks are served        hand.py         claimed tasks until they are settled
sampling.py  how one token is chosen       held_policy.py  which weights write
engines/     what computes                 heartbeat.py    what observers see
"""
