"""Flags of Megatron-LM that do not exist here, so that an error can tell them from typing mistakes."""

ELSEWHERE = frozenset(
    """
    activation-offload-fraction adlr-autoresume adlr-autoresume-interval app-tag-run-name app-tag-run-version
    async-ckpt-cpu-priority async-ckpt-io-priority async-ckpt-use-cpu-shm attention-output-gate
    batch-invariant-backend batch-invariant-mode bert-embedder-type bert-load biencoder-projection-dim
    biencoder-shared-query-context-model block-data-path cache-mla-latents calc-ft-timeouts chat-template
    check-for-large-grads check-for-spiky-loss ckpt-convert-update-legacy-dist-opt-format
    ckpt-drop-redundant-extra-state ckpt-fully-parallel-load-exchange-algo ckpt-fully-parallel-load-per-rank-objects
    ckpt-fully-parallel-load-process-group ckpt-fully-parallel-save-process-group ckpt-pg-tensors-cache-create
    ckpt-pg-tensors-cache-path classes-fraction config-logger-dir cpu-offloading-retain-pinned-cpu-buffers
    create-all-gather-group cuda-graph-modules cuda-graph-scope
    data-parallel-random-init data-per-class-fraction dataloader-defer-npy-index-mmap dataloader-fast-cache-load
    dataloader-inter-document-masking ddp-param-name-patterns-for-fp32-local-accumulation
    decode-only-cuda-graphs defer-embedding-wgrad-compute
    delay-offload-until-cuda-graph delta-offload-bytes-across-pp-ranks dino-bottleneck-size dino-freeze-last-layer
    dino-head-hidden-size dino-local-crops-number dino-local-img-size dino-norm-last-layer dino-teacher-temp
    dino-warmup-teacher-temp dino-warmup-teacher-temp-epochs disable-bf16-reduced-precision-matmul
    disable-ckpt-load-validate-sharding-integrity disable-clone-scatter-output-in-embedding
    disable-dsa-indexer-rotate-activation disable-dsa-indexer-scoring-relu disable-flight-recorder-dump-on-timeout
    disable-flight-recorder-extra-dump-on-exec disable-flight-recorder-include-only-active disable-jit-fuser
    disable-mamba-mem-eff-path disable-msc disable-save-tokenizer-assets disable-straggler-on-startup
    disable-strict-fsdp-dtensor-load disable-symmetric-registration
    disable-tokenizer-sentencepiece-ignore-extra-whitespaces disable-tp-comm-bulk-dgrad disable-tp-comm-bulk-wgrad
    disable-tp-comm-overlap-ag disable-tp-comm-overlap-rs disable-tp-comm-split-ag disable-tp-comm-split-rs
    dist-ckpt-save-pre-mcore-014 dist-ckpt-workers distrib-optim-fully-reshardable-mem-efficient
    dsa-indexer-head-dim dsa-indexer-k-norm-epsilon dsa-indexer-k-norm-fp32 dsa-indexer-loss-coeff
    dsa-indexer-n-heads dsa-indexer-rope-interleaved dsa-indexer-skip-topk-offset dsa-indexer-topk
    dsa-indexer-topk-freq dsa-indexer-use-sparse-loss dsa-kernel-backend dump-param-to-param-group-map
    embedding-path enable-chunked-prefill enable-cuda-graph enable-experimental enable-ft-package
    enable-full-sharding-in-hsdp enable-mhc-connections enable-msc ep-overlap-early-attn-memory-release
    error-injection-rate error-injection-type evidence-data-path exit-signal-handler-for-dataloader
    exit-signal-handler-for-training experimental-attention-variant expert-tensor-parallel-num-weight-shards
    external-cuda-graph fake-process-group fault-injector-delay-start-iteration fault-injector-fault-delay
    fault-injector-fault-probabilities fault-injector-fault-types fault-injector-mtti-seconds
    fault-injector-num-ranks fault-injector-offset-seconds fault-injector-ranks fault-injector-seed fim-data
    fim-eod-token fim-fragment-rate fim-middle-token fim-no-prefix fim-pad-token fim-prefix-token fim-rate
    fim-split-sample fim-spm-rate fim-suffix-token fine-grained-activation-offloading
    fine-grained-offloading-max-inflight-offloads flash-decode flight-recorder-dump-path
    flight-recorder-include-stack-trace flight-recorder-trace-buffer-size fp4-format fp4-param-gather
    fp4-quantizer-factory fp4-recipe fp8-output-proj fp8-quantizer-factory freeze-all-layers
    fsdp-db-use-persist-buf-on-alloc-fail fsdp-double-buffer fsdp-manual-registration ft-num-warmup-iters
    fused-residual-rmsnorm gdp-cutedsl-kernel gdp-num-chunk-states-to-recompute gdp-num-householder
    gpu-sniff-test-interval grpo-clamp-eps-lower grpo-clamp-eps-upper grpo-entropy-term-weight
    grpo-filter-groups-with-same-reward grpo-group-size grpo-iterations grpo-kl-beta grpo-prompts-per-step
    gtp-expert-remat-nccl-ub gtp-remat-nccl-ub gtp-remat-opt-in-modules
    gtp-remat-reduce-scatter-with-fp32-accumulation head-lr-mult heterogeneous-layers-config-encoded-json
    heterogeneous-layers-config-path high-priority-a2a-comm-stream high-priority-stream-groups
    hybrid-context-parallel hybrid-layer-pattern hybrid-override-pattern ict-head-size ict-load img-h img-w
    indexer-batch-size indexer-log-interval inference-coordinator-port inference-cuda-graph-all-prefills
    inference-cuda-graph-max-tokens inference-cuda-graph-scope inference-disable-ep-consensus
    inference-disable-triton-nvls-kernels inference-dynamic-batching inference-dynamic-batching-async-sched-mode
    inference-dynamic-batching-block-size inference-dynamic-batching-buffer-size-gb
    inference-dynamic-batching-cuda-graph-mixed-prefill-count
    inference-dynamic-batching-cuda-graph-sizing-distribution inference-dynamic-batching-logprobs-mode
    inference-dynamic-batching-mamba-memory-ratio inference-dynamic-batching-max-requests
    inference-dynamic-batching-max-tokens inference-dynamic-batching-num-cuda-graphs
    inference-dynamic-batching-paused-buffer-size-gb inference-dynamic-batching-prefix-caching
    inference-dynamic-batching-prefix-caching-coordinator-policy
    inference-dynamic-batching-prefix-caching-eviction-policy inference-dynamic-batching-prefix-caching-mamba-gb
    inference-dynamic-batching-prefix-caching-routing-alpha inference-dynamic-batching-sampling-backend
    inference-dynamic-batching-track-generated-token-events inference-dynamic-batching-track-paused-request-events
    inference-dynamic-batching-unified-memory-level inference-fuse-tp-communication inference-grouped-gemm-backend
    inference-logging-step-interval inference-moe-disable-fused-quant-kernels inference-moe-token-dispatcher-type
    inference-rng-tracker inference-shards inference-text-gen-server-logging
    inference-use-synchronous-zmq-collectives inference-wandb-logging inprocess-active-world-size
    inprocess-barrier-timeout inprocess-completion-timeout inprocess-empty-cuda-cache inprocess-granularity
    inprocess-hard-timeout inprocess-heartbeat-interval inprocess-heartbeat-timeout inprocess-last-call-wait
    inprocess-max-iterations inprocess-monitor-process-interval inprocess-monitor-thread-interval
    inprocess-progress-watchdog-interval inprocess-restart inprocess-soft-timeout inprocess-termination-grace-time
    is-hybrid-model iter-per-epoch keep-fp8-transpose-cache kitchen-attention-backend kitchen-config-file
    kitchen-recipe-number langrl-env-config lazy-mpu-init linear-attention-freq linear-conv-kernel-dim
    linear-key-head-dim linear-num-key-heads linear-num-value-heads linear-value-head-dim lion-beta1 lion-beta2
    load-main-params-from-ckpt log-device-memory-used log-energy log-max-attention-logit log-straggler
    logits-load-decode-threads logits-load-dir logits-load-ignore-errors logits-load-kd-loss-alpha
    logits-load-msc-prefetch-depth logits-load-prefetch-factor logits-save-dir logits-save-dtype logits-save-top-k
    logits-save-top-p logits-save-top-p-min-k mamba-head-dim mamba-inference-conv-states-dtype
    mamba-inference-ssm-states-dtype mamba-num-groups mamba-num-heads mamba-state-dim
    mamba-training-ssm-states-dtype mask-factor mask-type max-seqlen-per-dp-cp-rank
    megatron-fsdp-enable-fine-grained-param-gather megatron-fsdp-grad-comm-dtype megatron-fsdp-main-grads-dtype
    megatron-fsdp-main-params-dtype megatron-fsdp-max-pool-double-buffer megatron-fsdp-version
    mhc-init-gating-factor mhc-num-residual-streams mhc-recompute-layer-num mhc-sinkhorn-iterations
    min-offloaded-tensor-size mla-down-proj-fusion mlp-chunks-for-prefill mlp-chunks-for-training
    moe-apply-probs-on-input moe-combine-bwd-dtype moe-deepep-num-sms moe-dispatch-fwd-dtype
    moe-enable-routing-replay moe-expert-rank-capacity-factor moe-flex-dispatcher-backend
    moe-flex-dispatcher-num-sms moe-hybridep-num-blocks-permute moe-hybridep-num-blocks-unpermute
    moe-hybridep-num-sms moe-hybridep-num-sms-preprocessing moe-hybridep-pad-uneven-dispatch-inputs moe-latent-size
    moe-mlp-glu-interleave-size moe-ncclep-zero-copy moe-pad-experts-for-cuda-graph-inference moe-paged-stash
    moe-paged-stash-buffer-size-factor-cpu moe-paged-stash-buffer-size-factor-cuda moe-paged-stash-page-size
    moe-permute-fusion-into-hybridep moe-router-force-biased moe-router-quantile-balancing-ema
    moe-routing-trace-capture-hidden-states moe-routing-trace-capture-logits moe-routing-trace-dump-weights
    moe-routing-trace-max-training-iters moe-routing-trace-path moe-shared-expert-glu-interleave-size
    moe-single-grouped-bias moe-single-grouped-weight moe-upcycling-granularity moe-use-grouped-tensor
    moe-use-upcycling mrope-section mtp-detach-heads mtp-hsm mtp-hybrid-override-pattern mtp-loss-scaling-factor
    mtp-num-layers mtp-standalone mtp-use-repeated-layer muon-coefficient-type muon-extra-scale-factor
    muon-fp32-matmul-prec muon-momentum muon-nesterov muon-no-split-qkv muon-num-ns-steps muon-scalar-optimizer
    muon-scale-mode muon-tp-mode muon-use-syrk mup-attn-scale-power mup-base-head-dim mup-base-hidden-size
    mup-embedding-mult mup-output-mult mup-width-mult nccl-all-reduce-for-prefill
    no-ckpt-load-validate-sharding-integrity no-clone-scatter-output-in-embedding no-data-sharding
    no-dsa-indexer-rotate-activation no-dsa-indexer-scoring-relu no-flight-recorder-dump-on-timeout
    no-flight-recorder-extra-dump-on-exec no-flight-recorder-include-only-active no-gradient-reduce-div-fusion
    no-inference-disable-ep-consensus no-inference-dynamic-batching-prefix-caching
    no-inference-text-gen-server-logging no-inference-use-synchronous-zmq-collectives no-inference-wandb-logging
    no-rl-inference-logprobs-is-correction no-rl-offload-inference-model-weights-when-idle no-rl-partial-rollouts
    no-rl-persist-cuda-graphs no-rl-skip-bos-token no-rl-training-cuda-graphs no-rl-use-sequence-packing
    no-rl-verify-model-weights-swap no-rope-freq no-save-tokenizer-assets no-strict-fsdp-dtensor-load
    no-tokenizer-sentencepiece-ignore-extra-whitespaces no-tp-comm-bulk-dgrad no-tp-comm-bulk-wgrad
    no-tp-comm-overlap-ag no-tp-comm-overlap-rs no-tp-comm-split-ag no-tp-comm-split-rs
    no-use-layer-wise-param-layout non-persistent-ckpt-type non-persistent-global-ckpt-dir
    non-persistent-local-ckpt-algo non-persistent-local-ckpt-dir non-persistent-save-interval num-channels
    num-classes num-speculative-tokens nvtx-ranges object-storage-cache-path offload-modules one-logger-async
    one-logger-project one-logger-run-name optimizer-cuda-graph otel-enabled otel-service-name otel-span-groups
    outer-dp-sharding-strategy output-bert-embeddings output-logit-dtype
    overlap-dispatch-backward-with-experts-wgrad overlap-p2p-communication-warmup-flush override-ckpt-iteration
    patch-dim per-dataset-sequences-path perform-rl-step phase-transition-iterations
    pipeline-model-parallel-comm-backend pytorch-profiler-collect-callstack pytorch-profiler-collect-chakra
    pytorch-profiler-collect-shapes qk-clip qk-clip-alpha qk-clip-threshold query-in-block-prob record-shapes
    refit-method relative-attention-max-distance relative-attention-num-buckets replication replication-factor
    replication-jump result-rejected-tracker-filename retriever-report-topk-accuracies retriever-score-scaling
    reuse-grad-buf-for-mxfp8-param-ag rl-consumption-granularity rl-default-temperature rl-default-top-k
    rl-default-top-p rl-durable-rollout-bank rl-generation-lag rl-importance-sampling-truncation-coef
    rl-inference-expert-model-parallel-size rl-inference-expert-tensor-model-parallel-size
    rl-inference-logprobs-is-correction rl-inference-model-unified-memory-level rl-inference-parsers
    rl-inference-pipeline-model-parallel-size rl-inference-tensor-model-parallel-size rl-kv-cache-management-mode
    rl-max-inflight-requests rl-offload-inference-model-weights-when-idle rl-offload-optimizer-during-inference
    rl-partial-rollouts rl-persist-cuda-graphs rl-profile rl-profile-dir rl-prompts-per-eval rl-rollout-bank-dir
    rl-rollout-bank-max-bytes rl-sequence-packing-algo rl-sequence-packing-max-sequences-per-bin rl-skip-bos-token
    rl-submission-granularity rl-training-cuda-graphs rl-use-sequence-packing rl-verify-model-weights-swap
    run-workload-inspector-server sample-rate save-activations-interval save-dgrads-interval save-params-interval
    save-tokens-per-expert-interval save-wgrads-interval sft sft-tokenizer-prompt-format sharp-enabled-group
    softmax-type straggler-ctrlr-port straggler-minmax-count suggested-communication-unit-size swin-backbone-type
    symmetric-ar-type te-precision-config-file te-rng-tracker tensor-parallel-num-weight-shards test-mode
    titles-data-path tokenizer-metadata tp-comm-bootstrap-backend tp-comm-overlap-rs-dgrad
    use-fused-weighted-squared-relu use-gigatoken use-grouped-gemm-for-dense-mlp use-grouped-gemm-for-shared-expert
    use-kitchen-attention use-legacy-static-engine use-mup use-nccl-ub use-one-sent-docs use-ring-exchange-p2p
    use-same-sampling-seed-across-dp-ranks use-sharp use-te-activation-func
    use-transformer-engine-op-fuser vision-backbone-type vision-pretraining vision-pretraining-type
    wgrad-deferral-limit
    """.split()  # noqa: SIM905 - a list of words is easier to read
)
"""Flags of its current training parser, without the leading dashes."""

REMOVED = frozenset(
    """
    async-indexer block-index-path block-top-k cache-dir cloze-eval data-epochs data-loader debug deep-init delim
    disable-chunked-prefill epochs eval-batch-size eval-hf eval-max-preds-per-seq eval-seq-length eval-text-key
    faiss-use-gpu fp32-embedding fp32-layernorm fp32-tokentypes genfile greedy grpo-default-temperature
    grpo-default-top-p hash-data-path hybrid-attention-ratio hybrid-mlp-ratio img-dim
    inference-dynamic-batching-buffer-guaranteed-fraction inference-dynamic-batching-buffer-overflow-factor
    inference-dynamic-batching-chunk-size inference-dynamic-batching-cuda-graph-max-tokens
    inference-dynamic-batching-max-requests-override inference-dynamic-batching-max-tokens-override
    inference-flask-server-logging inference-wandb-logging-step-interval initialize-socket-comms
    input-data-sizes-file keep-fp8-transpose-cache-when-using-custom-fsdp langrl-external-server
    langrl-inference-server-conversation-template langrl-inference-server-type lazy-loader load-all-rng
    load-model-opt-format load-openai load-optim load-rng loose-json max-num-samples max-preds-per-seq
    max-training-rank num-samples num-unique-layers one-logger-entity out-seq-length overlapping-eval
    param-sharing-style presplit-sentences pretrained-bert recompute report-topk-accuracies resume-dataloader
    retriever-seq-length retro-add-retriever retro-attention-gate retro-cyclic-train-iters
    retro-encoder-attention-dropout retro-encoder-hidden-dropout retro-encoder-layers retro-no-verify-neighbor-count
    retro-num-neighbors retro-num-retrieved-chunks retro-project-dir retro-return-doc-ids retro-workdir
    rl-calculate-intra-group-similarity rl-generation-batch-size rl-num-parallel-generation-batches
    rl-num-parallel-generations rl-offload-kv-cache-during-training rl-parallel-generation-tasks
    rl-remove-kv-cache-during-training rl-reset-cuda-graphs rl-sequence-packing-bin-size sample-input-file
    sample-output-file save-all-rng save-iters save-optim save-rng shuffle strict-lambada temperature test-data
    text-key tokenizer-model-type tokenizer-path top-k top-p train-data use-npy-data-loader use-tfrecords valid-data
    """.split()  # noqa: SIM905 - a list of words is easier to read
)
"""Flags that it had and removed without a successor."""
