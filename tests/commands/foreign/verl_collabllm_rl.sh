# Reinforcement learning of the CollabLLM recipe.
CHECKPOINT=${1:-}
if [ -z "$CHECKPOINT" ]; then
    CHECKPOINT=null
fi
rows=$HOME/data/problems
python3 -m verl.trainer.main_ppo \
    trainer.val_before_train=False algorithm.adv_estimator=grpo \
    data.train_files=$rows/rl_train.parquet data.val_files=$rows/rl_validation.parquet \
    reward_model.reward_manager=collabllm \
    +reward_model.reward_kwargs.metric_weights.accuracy=1 \
    +reward_model.reward_kwargs.metric_weights.interactivity=1 \
    +reward_model.reward_kwargs.metric_weights.token_amount=-0.0001 \
    +reward_model.reward_kwargs.llm_judge_kwargs.model=openai/gpt-4o-mini \
    +reward_model.reward_kwargs.llm_judge_kwargs.max_tokens=2048 \
    +reward_model.reward_kwargs.llm_judge_kwargs.temperature=0 \
    data.train_batch_size=16 data.max_prompt_length=8196 data.max_response_length=2048 \
    actor_rollout_ref.model.path="Qwen/Qwen2.5-7B-Instruct" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=8 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24000 \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.rollout.mode=async actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.multi_turn.max_user_turns=2 \
    actor_rollout_ref.rollout.multi_turn.max_assistant_turns=3 \
    actor_rollout_ref.rollout.multi_turn.num_repeat_rollouts=3 \
    actor_rollout_ref.rollout.agent.agent_loop_config_path=$PWD/agent.yaml \
    custom_reward_function.path=reward_function.py \
    custom_reward_function.name=conversation_level_reward_func \
    trainer.nnodes=1 trainer.n_gpus_per_node=8 \
    trainer.save_freq=100 trainer.test_freq=10 trainer.total_epochs=20 \
    trainer.resume_from_path=$CHECKPOINT
