"""Hugging Face's Trainer with `outlast.hf`."""

import transformers

import outlast.hf
from body import BATCH, DEVICE, DIRECTORY, LR, Data, Net, say


class Said(transformers.TrainerCallback):
    """Writes the line of each step."""

    def on_step_end(self, args, state, control, **more):
        say(state.global_step, net, args.process_index, args.world_size)


transformers.set_seed(0)
net = Net()
output = DIRECTORY / "trainer"
arguments = transformers.TrainingArguments(
    str(output), max_steps=100_000, per_device_train_batch_size=BATCH, learning_rate=LR, lr_scheduler_type="constant",
    save_strategy="no", logging_strategy="no", report_to="none", use_cpu=DEVICE == "cpu", disable_tqdm=True,
)  # fmt: skip
trainer = transformers.Trainer(net, arguments, train_dataset=Data(), callbacks=[Said()])
outlast.hf.attach(trainer, batch=BATCH)
trainer.train()
