"""The example trainer's batch loop: register, take batches from the server, and write down what it would train on."""

import json
import sys
from pathlib import Path

from example_trainer.api import register_trainer
from example_trainer.config import TrainingConfig
from example_trainer.data import get_data


def main(url, batch_size, batches, out):
    config = TrainingConfig(
        model_name="none", batch_size=batch_size, gradient_accumulation_steps=1, training_steps=batches, atropos_url=url
    )
    register_trainer(config)
    taken = []
    while len(taken) < batches:
        taken += get_data(config.batch_size, config.seq_len, config.atropos_url)[0]
    rows = []
    for batch in taken:
        for tokens, labels, advantages, temperatures, logprobs in zip(*batch, strict=True):
            assert tokens.shape == labels.shape == logprobs.shape == (batch_size, tokens.shape[1])
            assert advantages.shape == (batch_size, 1)
            assert temperatures.shape == (batch_size, 1, 1)
            for number in range(batch_size):
                rows.append(
                    {
                        "tokens": tokens[number].tolist(),
                        "labels": labels[number].tolist(),
                        "logprobs": logprobs[number].tolist(),
                        "advantage": advantages[number].item(),
                    }
                )
    Path(out).write_text(json.dumps(rows))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
