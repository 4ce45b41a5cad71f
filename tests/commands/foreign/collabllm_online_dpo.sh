export WANDB_API_KEY=abcdefgh12345678
DATASET=math-hard
CUDA_VISIBLE_DEVICES=0,1 torchrun --nnodes=1 --nproc_per_node=2 -m scripts.train.online_dpo.py \
    --dataset_repo collabllm/collabllm-multiturn-$DATASET --dataset_name $DATASET \
    --metric_names "math->accuracy" interactivity token_amount --metric_weights 1 1 -0.5 \
    --user_generation_kwargs '{"model": "openai/gpt-4o-mini", "temperature": 1.0}' \
    --assistant_generation_kwargs '{"temperature": 0.6, "max_tokens": 1024}' \
    --reward_generation_kwargs '{"model": "openai/gpt-4o", "temperature": 0}' \
    --max_new_turns 4 --num_samples 3 --output_dir runs/online --model_name runs/offline/hf \
    --learning_rate 5e-6 --num_train_epochs 8 --per_device_train_batch_size 2 --gradient_accumulation_steps 8 \
    --eval_steps 20 --save_total_limit 2 --minimum_gap 0.1 --max_new_tokens 1024 --use_lora --peft_r 32 \
    --gpu_memory_utilization 0.6 --wandb_project collabllm --hf_org me --push_to_hub
