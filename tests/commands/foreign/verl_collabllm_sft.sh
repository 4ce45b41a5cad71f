#!/bin/bash
ranks=4
torchrun --standalone --nnodes=1 --nproc_per_node=$ranks -m verl.trainer.fsdp_sft_trainer \
    data.train_files=$HOME/data/problems/sft_train.parquet \
    data.val_files=$HOME/data/problems/sft_validation.parquet \
    data.multiturn.enable=true data.multiturn.messages_key=prompt \
    optim.lr=1e-6 data.train_batch_size=64 data.micro_batch_size_per_gpu=2 data.max_length=8196 \
    model.partial_pretrain=Qwen/Qwen2.5-7B-Instruct \
    trainer.project_name=sft trainer.experiment_name=sft-7B trainer.logger=console \
    trainer.total_epochs=3 $@ \
    ulysses_sequence_parallel_size=1 use_remove_padding=true
