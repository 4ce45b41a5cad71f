python -m scripts.engine.build_dataset.py \
    --dataset_name bigcodebench \
    --metric_names "code->pass_rate" interactivity token_amount --metric_weights 1 1 -0.5 \
    --user_generation_kwargs '{"model": "openai/gpt-4o-mini"}' \
    --assistant_generation_kwargs '{"model": "openai/gpt-4o", "max_tokens": 2048, "temperature": 0.8}' \
    --reward_generation_kwargs '{"model": "openai/gpt-4o", "temperature": 0}' \
    --num_candidate_responses 3 --proact_prompt_ratio 0.5 --max_total_turns 14 --max_new_turns 4 --num_samples 3 \
    --train_size 500 --max_workers 16 --max_metric_workers 8 --output_dir runs/built --hf_entity me --resume
