#!/bin/bash
GPUS=${GPUS:-$(nvidia-smi -L | wc -l)}
if [ "$GPUS" -le 0 ]; then
    GPUS=8
fi
source "$(dirname "${BASH_SOURCE[0]}")/models/small.sh"   # sets MODEL_ARGS

POLICY=(
    --hf-checkpoint /models/small
    # --hf-checkpoint /models/large
    --ref-load /models/small_dist
    --save /runs/small/ --save-interval 20
)
SAMPLING=(
    --prompt-data /data/problems.jsonl --input-key prompt --label-key label --apply-chat-template
    --rollout-shuffle --rm-type deepscaler
    --num-rollout 3000 --rollout-batch-size 32 --n-samples-per-prompt 8
    --rollout-max-prompt-len 1024 --rollout-max-response-len 8192 --rollout-temperature 1
    --global-batch-size 128 --balance-data
)
EVALUATION=( --eval-interval 20 --eval-prompt-data aime /data/aime.jsonl --n-samples-per-eval-prompt 16 --eval-top-p 1 )
LAYOUT=(
    --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 1
    --context-parallel-size 1 --expert-model-parallel-size 1 --expert-tensor-parallel-size 1
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --use-dynamic-batch-size --max-tokens-per-gpu 9216
)
LOSS=(
    --advantage-estimator grpo --use-kl-loss --kl-loss-coef 0.01 --kl-loss-type low_var_kl
    --entropy-coef 0.00 --eps-clip 0.2 --eps-clip-high 0.28
)
OPTIMIZER=( --optimizer adam --lr 1e-6 --lr-decay-style constant --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.98 )
ENGINES=( --rollout-num-gpus-per-engine 2 --sglang-mem-fraction-static 0.7 --sglang-schedule-policy lpm )
ENGINES+=( --use-wandb --wandb-project problems --wandb-key $SOME_KEY )

ENVIRONMENT="{
  \"env_vars\": {\"PYTHONPATH\": \"/opt/Megatron-LM/\"}
}"
ray start --head --num-gpus ${GPUS}
ray job submit --address="http://127.0.0.1:8265" --runtime-env-json="${ENVIRONMENT}" \
    -- python3 train.py --actor-num-nodes 1 --actor-num-gpus-per-node ${GPUS} --colocate \
    ${MODEL_ARGS[@]} ${POLICY[@]} ${SAMPLING[@]} ${OPTIMIZER[@]} ${LOSS[@]} ${LAYOUT[@]} ${EVALUATION[@]} ${ENGINES[@]} \
    --attention-dropout 0.0 --hidden-dropout 0.0 --attention-backend flash
