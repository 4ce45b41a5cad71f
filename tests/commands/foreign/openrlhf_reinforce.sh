set -x
ray job submit --address="http://127.0.0.1:8265" --runtime-env-json='{"working_dir": "/work"}' -- \
    python3 -m openrlhf.cli.train_ppo_ray \
    --actor.num_nodes 1 --actor.num_gpus_per_node 8 --ref.num_nodes 1 --ref.num_gpus_per_node 8 \
    --vllm.num_engines 4 --vllm.tensor_parallel_size 2 --vllm.gpu_memory_utilization 0.6 \
    --train.colocate_all --vllm.enable_sleep --ds.enable_sleep --ds.zero_stage 3 --ds.param_dtype bf16 \
    --actor.model_name_or_path meta-llama/Llama-3.1-8B-Instruct --ckpt.output_dir runs/reinforce \
    --reward.remote_url http://localhost:5000/get_reward \
    --train.batch_size 128 --rollout.batch_size 128 --rollout.n_samples_per_prompt 8 --train.max_epochs 1 \
    --data.max_len 4096 --rollout.max_new_tokens 2048 --data.prompt_dataset my/prompts --data.input_key text \
    --algo.advantage.estimator reinforce --algo.kl.init_coef 1e-3 --algo.kl.use_loss --algo.kl.estimator k3 \
    --actor.adam.lr 5e-7 --actor.eps_clip_low_high 0.2 0.27 --ckpt.save_steps -1 --ds.packing_samples
