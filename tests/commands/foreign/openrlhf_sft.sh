# With the options in one word, as until 0.9.
read -r -d '' arguments <<EOF
openrlhf.cli.train_sft \
   --max_len 2048 --dataset my/conversations --input_key question --output_key response \
   --train_batch_size 256 --micro_train_batch_size 2 --max_samples 500000 \
   --pretrain meta-llama/Meta-Llama-3-8B --save_path ./runs/sft --save_steps -1 --max_epochs 1 \
   --zero_stage 2 --bf16 --attn_implementation flash_attention_2 --learning_rate 5e-6 --gradient_checkpointing \
   --packing_samples --lora_rank 16 --l2 0.1
EOF
if [[ ${1} != "slurm" ]]; then
    deepspeed --module $arguments
fi
