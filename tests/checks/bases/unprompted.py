"""Words to write backwards, in rows without a prompt."""

from checks.bases.words import *


@hookimpl
def tasks(split: Literal["train", "test"], seed):
    rng = random.Random(f"{split}:{seed}")
    while word := "".join(rng.choices("abcdefgh", k=8)):
        yield Word.model_validate({"responses_create_params": {"input": []}, "word": word})


@hookimpl
def reset(task: Word):
    return Reset(messages=[f"Write {task.word[::-1]} backwards."])
