# SPDX-License-Identifier: Apache-2.0
"""Settings of vLLM 0.31 to 0.33 that do not shape the bytes of a block, each under its reason.

Whatever is not listed here counts: a field that a later vLLM adds separates engines that differ in it until it is entered. A test walks all
fields and environment variables of the installed vLLM, and fails for one that is neither here nor in its own list of those that do shape
blocks.
"""

from collections.abc import Mapping

_ELSEWHERE = "its effect is in the key or in another field of the namespace, by content"
_PLACE = "names, paths, addresses, processes and devices: where something is"
_TEXT = "makes tokens of texts; the tokens are in the key"
_WHEN = "decides order, batch sizes and retention of computations"
_AFTER = "concerns steps after the KV of the last layer: logits, sampling, pooling, answers"
_ROUNDING = "another kernel, graph or order of sums for the same formula and precision: results differ by rounding, as between GPUs"
_MEMORY = "where weights lie and how they are read; their content is in the namespace"
_WATCHING = "logs, metrics, profiles"
_REFUSED = "refused at start, or of a path that does not run with the connector"

FIELDS: Mapping[str, Mapping[str, str]] = {
    _ELSEWHERE: {
        "VllmConfig": "speculative_config ec_transfer_config",
        "ModelConfig": "model model_weights revision hf_config hf_config_path hf_overrides config_format seed max_model_len "
        "word_embeddings_untied_by_checkpoint",
        "CacheConfig": "block_size user_specified_block_size _block_size_resolved kv_cache_layout prefix_caching_hash_algo "
        "mamba_block_size user_specified_mamba_block_size mamba_page_size_padded skip_page_size_padded mamba_cache_mode "
        "effective_attention_block_size is_attention_free hash_block_size cache_hit_alignment_tokens",
        "ParallelConfig": "pipeline_parallel_size tensor_parallel_size is_moe_model",
        "SchedulerConfig": "runner_type is_multimodal_model disable_hybrid_kv_cache_manager",
        "LoadConfig": "load_format model_loader_extra_config",
        "AttentionConfig": "backend backend_per_kind",
        "LoRAConfig": "lora_dtype default_mm_loras",
        "SpeculativeConfig": "model revision method attention_backend target_model_config target_parallel_config draft_parallel_config",
        "MultiModalConfig": "mm_hasher_algorithm",
    },
    _PLACE: {
        "VllmConfig": "kv_transfer_config kv_events_config instance_id",
        "ModelConfig": "allowed_local_media_path allowed_media_domains hf_token served_model_name",
        "ParallelConfig": "data_parallel_size data_parallel_size_local data_parallel_rank data_parallel_rank_local data_parallel_index "
        "data_parallel_master_ip data_parallel_rpc_port data_parallel_master_port data_parallel_backend data_parallel_external_lb "
        "data_parallel_hybrid_lb ray_workers_use_nsight ray_runtime_env placement_group distributed_executor_backend master_addr "
        "master_port node_rank nnodes numa_bind numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids world_size rank "
        "_data_parallel_master_port_list _coord_store_port _api_process_count _api_process_rank",
        "DeviceConfig": "device",
    },
    _TEXT: {
        "ModelConfig": "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init io_processor_plugin enable_prompt_embeds",
        "MultiModalConfig": "interleave_mm_strings",
    },
    _WHEN: {
        "VllmConfig": "shutdown_timeout weight_transfer_config ec_manager_config",
        "ModelConfig": "spec_target_max_model_len renderer_num_workers",
        "CacheConfig": "prefix_match_unit gpu_memory_utilization num_gpu_blocks_override enable_prefix_caching "
        "prefix_cache_retention_interval enable_mamba_shared_prefix_checkpoint num_gpu_blocks num_cpu_blocks kv_cache_size_tokens "
        "kv_cache_max_concurrency kv_cache_memory_bytes kv_offloading_size kv_offloading_backend "
        "simple_cpu_offload_num_blocks",
        "ParallelConfig": "dp_sync_interval enable_elastic_ep elastic_ep_max_dp_size enable_dbo ubatch_size dbo_decode_token_threshold "
        "dbo_prefill_token_threshold disable_nccl_for_dp_synchronization distributed_timeout_seconds cpu_distributed_timeout_seconds "
        "max_parallel_loading_workers enable_fault_tolerance fault_tolerance_config enable_shm_tensor_arena",
        "SchedulerConfig": "max_num_batched_tokens max_num_scheduled_tokens max_num_seqs max_num_active_seqs long_prefill_token_threshold "
        "long_prefill_token_threshold_adaptive max_num_queued_reqs max_num_queued_tokens enable_chunked_prefill "
        "max_num_encoder_input_tokens encoder_cache_size policy disable_chunked_mm_input scheduler_cls scheduler_reserve_full_isl "
        "watermark prefill_schedule_interval async_scheduling stream_interval",
        "LoRAConfig": "max_lora_rank max_loras max_cpu_loras",
        "SpeculativeConfig": "num_speculative_tokens num_speculative_tokens_per_batch_size draft_tensor_parallel_size tensor_parallel_size "
        "max_model_len disable_padded_drafter_batch prompt_lookup_max prompt_lookup_min suffix_decoding_max_tree_depth "
        "suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor suffix_decoding_min_token_prob",
        "MultiModalConfig": "limit_per_prompt enable_mm_embeds allow_missing_mm_embeddings mm_processor_cache_gb mm_processor_cache_type "
        "mm_shm_cache_max_object_size_mb skip_mm_profiling mm_tensor_ipc mm_ipc_gpu_memory_gb",
        "CompilationConfig": "cudagraph_num_of_warmups compilation_time encoder_compilation_time",
        "KernelConfig": "enable_flashinfer_autotune enable_cutedsl_warmup enable_jit_warmup enable_rocm_segmented_attn_autotune",
    },
    _AFTER: {
        "VllmConfig": "structured_outputs_config reasoning_config watermark_config aux_output_config",
        "ModelConfig": "return_sampling_mask max_logprobs logprobs_mode use_fp64_gumbel enable_trace_replay generation_config "
        "override_generation_config logits_processors pooler_config",
        "ParallelConfig": "enable_batch_sharded_sampling",
        "LoRAConfig": "max_lora_cls_labels",
        "SpeculativeConfig": "use_local_argmax_reduction rejection_sample_method synthetic_acceptance_rates synthetic_acceptance_length "
        "enable_adaptive_verification draft_sample_method dspark_draft_topk draft_lm_head_quantization "
        "xpress_topc fly_window_size fly_entropy_threshold fly_entropy_top_k",
    },
    _ROUNDING: {
        "VllmConfig": "optimization_level performance_mode",
        "ModelConfig": "enforce_eager disable_cascade_attn",
        "ParallelConfig": "enable_expert_parallel enable_ep_weight_filter enable_eplb eplb_config expert_placement_strategy "
        "all2all_backend disable_custom_all_reduce enable_hc_sp",
        "AttentionConfig": "minimax_m3_msa_decode_backend flash_attn_version flash_attn_max_num_splits_for_cuda_graph "
        "tq_max_kv_splits_for_cuda_graph mla_prefill_backend sparse_mla_force_mqa flex_attn_block_m flex_attn_block_n "
        "flex_attn_q_block_size flex_attn_kv_block_size sparse_mla_prefill_workspace_factor tokenspeed_mla_min_split_kv "
        "indexer_tp_shard_min_rows minimax_m3_indexer_cp",
        "MambaConfig": "backend ssu_algorithm",
        "KernelConfig": "ir_op_priority sparse_indexer_topk_backend",
        "LoRAConfig": "fully_sharded_loras specialize_active_lora",
        "SpeculativeConfig": "enforce_eager",
        "MultiModalConfig": "mm_encoder_tp_mode mm_encoder_attn_backend",
        "CompilationConfig": "mode backend custom_ops ir_enable_torch_wrap splitting_ops compile_mm_encoder cudagraph_mm_encoder "
        "encoder_cudagraph_token_budgets encoder_cudagraph_max_vision_items_per_batch encoder_cudagraph_max_frames_per_batch "
        "compile_sizes compile_ranges_endpoints inductor_compile_config cudagraph_mode cudagraph_capture_sizes cudagraph_copy_inputs "
        "cudagraph_decoder_replay decoder_replay_cudagraph_capture_sizes decoder_replay_trim_threshold "
        "cudagraph_specialize_lora use_inductor_graph_partition pass_config max_cudagraph_capture_size dynamic_shapes_config "
        "fast_moe_cold_start enabled_custom_ops disabled_custom_ops",
    },
    _MEMORY: {
        "VllmConfig": "offload_config engram_config",
        "ModelConfig": "enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend enable_nccl_comm_suspend "
        "enable_cumem_allocator allow_deprecated_quantization sleep_mode_offload_cudagraph",
        "LoadConfig": "download_dir safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size device "
        "pt_load_map_location",
    },
    _WATCHING: {
        "VllmConfig": "observability_config logging_config profiler_config watchdog_config",
        "LoadConfig": "use_tqdm_on_load",
        "MultiModalConfig": "mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin",
        "CompilationConfig": "debug_dump_path cache_dir compile_cache_save_format local_cache_dir traced_files static_forward_context "
        "static_all_moe_layers",
    },
    _REFUSED: {
        "ParallelConfig": "prefill_context_parallel_size decode_context_parallel_size dcp_kv_cache_interleave_size dcp_comm_backend "
        "dcp_q_replicate cp_kv_cache_interleave_size _allow_auto_resolve_cp_interleave_size",
        "SpeculativeConfig": "disable_lookahead_block_hashes",
    },
}
"""By reason, then by configuration class."""

ENVIRONMENT: Mapping[str, str] = {
    _ELSEWHERE: "VLLM_KV_CACHE_LAYOUT VLLM_PP_LAYER_PARTITION VLLM_MODEL_REDIRECT_PATH VLLM_TEST_FORCE_LOAD_FORMAT "
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN VLLM_SKIP_MODEL_NAME_VALIDATION VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE",
    _PLACE: "VLLM_TARGET_DEVICE VLLM_MAIN_CUDA_VERSION MAX_JOBS NVCC_THREADS VLLM_USE_PRECOMPILED VLLM_USE_PRECOMPILED_RUST "
    "VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX VLLM_SKIP_VERSION_SUFFIX VLLM_DOCKER_BUILD_CONTEXT VLLM_BUILD_COMMIT VLLM_BUILD_PIPELINE "
    "VLLM_BUILD_URL VLLM_IMAGE_TAG CMAKE_BUILD_TYPE VERBOSE VLLM_CONFIG_ROOT VLLM_CACHE_ROOT VLLM_HOST_IP VLLM_PORT VLLM_RPC_BASE_PATH "
    "VLLM_USE_MODELSCOPE CUDA_HOME VLLM_NCCL_SO_PATH LD_LIBRARY_PATH LOCAL_RANK CUDA_VISIBLE_DEVICES VLLM_API_KEY S3_ACCESS_KEY_ID "
    "S3_SECRET_ACCESS_KEY S3_ENDPOINT_URL VLLM_CPU_OMP_THREADS_BIND VLLM_CPU_NUM_OF_RESERVED_CPU VLLM_CPU_CI_ENV "
    "VLLM_WORKER_MULTIPROC_METHOD VLLM_ENABLE_V1_MULTIPROCESSING VLLM_ASSETS_CACHE VLLM_ASSETS_CACHE_MODEL_CLEAN VLLM_XLA_CACHE_PATH "
    "VLLM_RAY_PER_WORKER_GPUS VLLM_RAY_BUNDLE_INDICES VLLM_CUDART_SO_PATH VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE VLLM_DP_MASTER_IP "
    "VLLM_DP_MASTER_PORT VLLM_RAY_DP_PACK_STRATEGY VLLM_RAY_DP_PLACEMENT_NODE_IPS VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY "
    "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM "
    "VLLM_USE_RAY_WRAPPED_PP_COMM VLLM_USE_RAY_V2_EXECUTOR_BACKEND VLLM_NIXL_SIDE_CHANNEL_HOST VLLM_NIXL_SIDE_CHANNEL_PORT "
    "VLLM_P2P_SIDE_CHANNEL_HOST VLLM_P2P_SIDE_CHANNEL_PORT VLLM_EC_SIDE_CHANNEL_HOST VLLM_EC_SIDE_CHANNEL_PORT "
    "VLLM_MOONCAKE_CONNECTOR_TIMEOUT VLLM_MOONCAKE_BOOTSTRAP_PORT VLLM_MOONCAKE_STORE_TIER_LOG VLLM_MOONCAKE_LOAD_RECV_THREADS "
    "VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT MOONCAKE_PREFERRED_SEGMENT "
    "MOONCAKE_REQUESTER_LOCAL_HOSTNAME VLLM_LOOPBACK_IP VLLM_PROCESS_NAME_PREFIX VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME "
    "VLLM_GPU_NIC_PCIE_MAPPING VLLM_NIC_SELECTION_VARS VLLM_NCCL_INCLUDE_PATH VLLM_ENABLE_CUDA_COMPATIBILITY VLLM_CUDA_COMPATIBILITY_PATH "
    "VLLM_LORA_RESOLVER_CACHE_DIR VLLM_LORA_RESOLVER_HF_REPO_LIST VLLM_MEDIA_CONNECTOR VLLM_TPU_USING_PATHWAYS VLLM_USE_RUST_FRONTEND "
    "VLLM_USE_RUST_BENCH VLLM_RUST_FRONTEND_PATH",
    _TEXT: "VLLM_USE_FASTOKENS VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS "
    "VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS VLLM_SYSTEM_START_DATE VLLM_ENABLE_COHERE_API VLLM_CHAT_TEMPLATE_FUEL "
    "VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT",
    _WHEN: "VLLM_ENGINE_ITERATION_TIMEOUT_S VLLM_ENGINE_READY_TIMEOUT_S VLLM_CPU_KVCACHE_SPACE VLLM_XPU_PP_MICROBATCH "
    "VLLM_IMAGE_FETCH_TIMEOUT VLLM_VIDEO_FETCH_TIMEOUT VLLM_AUDIO_FETCH_TIMEOUT VLLM_MEDIA_CACHE VLLM_MEDIA_CACHE_MAX_SIZE_MB "
    "VLLM_MEDIA_CACHE_TTL_HOURS VLLM_MEDIA_FETCH_MAX_RETRIES VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB VLLM_MEDIA_URL_ALLOW_REDIRECTS "
    "VLLM_MEDIA_LOADING_THREAD_COUNT VLLM_MAX_AUDIO_CLIP_FILESIZE_MB VLLM_MAX_AUDIO_DECODE_DURATION_S VLLM_MAX_AUDIO_DECODE_BYTES "
    "VLLM_MAX_EMBED_DECODE_BYTES VLLM_MAX_AUDIO_PREPROCESS_WORKERS VLLM_MAX_IMAGE_PIXELS VLLM_SPARSE_INDEXER_MAX_LOGITS_MB "
    "VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN VLLM_KEEP_ALIVE_ON_ENGINE_DEATH VLLM_HTTP_TIMEOUT_KEEP_ALIVE VLLM_MAX_N_SEQUENCES "
    "VLLM_MAX_COMPLETION_PROMPTS VLLM_MAX_STOP_STRINGS VLLM_MAX_NUM_BAD_WORDS VLLM_MAX_BAD_WORDS_TOTAL_TOKENS "
    "VLLM_TRITON_JIT_WARMUP_NUM_THREADS VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_RANDOMIZE_DP_DUMMY_INPUTS "
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS VLLM_SERVER_DEV_MODE VLLM_V1_OUTPUT_PROC_CHUNK_SIZE "
    "VLLM_MQ_MAX_CHUNK_BYTES_MB VLLM_DEEP_GEMM_WARMUP VLLM_MSGPACK_ZERO_COPY_THRESHOLD VLLM_ALLOW_INSECURE_SERIALIZATION "
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION VLLM_ENABLE_STARTUP_PLAN VLLM_ENABLE_RESPONSES_API_STORE VLLM_ELASTIC_EP_SCALE_UP_LAUNCH "
    "VLLM_ELASTIC_EP_DRAIN_REQUESTS VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS VLLM_USE_SIMPLE_KV_OFFLOAD "
    "VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES VLLM_GC_DEBUG VLLM_USE_SPINLOOP_EXT "
    "VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE VLLM_DISABLE_COMPILE_CACHE VLLM_COMPILE_CACHE_SAVE_FORMAT VLLM_FORCE_AOT_LOAD "
    "VLLM_XLA_CHECK_RECOMPILATION VLLM_ENABLE_CUDAGRAPH_GC VLLM_HAS_FLASHINFER_CUBIN VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE "
    "VLLM_RINGBUFFER_WARNING_INTERVAL VLLM_HTTP_MAX_REQUEST_BODY_SIZE VLLM_MAX_MEDIA_REQUEST_DECODE_BYTES "
    "VLLM_MAX_MEDIA_REQUEST_DOWNLOAD_SIZE_MB VLLM_P2P_HANDSHAKE_TIMEOUT_S VLLM_P2P_IDLE_TIMEOUT_S VLLM_P2P_MAX_PEERS",
    _AFTER: "VLLM_USE_FLASHINFER_SAMPLER VLLM_V1_USE_OUTLINES_CACHE VLLM_XGRAMMAR_CACHE_MB VLLM_REGEX_COMPILATION_TIMEOUT_S "
    "VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS VLLM_ENFORCE_STRICT_TOOL_CALLING VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY "
    "VLLM_COMPUTE_NANS_IN_LOGITS VLLM_RAISE_ON_LOGIT_NANS VLLM_XPU_USE_SAMPLER_KERNEL VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT",
    _ROUNDING: "VLLM_BATCH_INVARIANT VLLM_REPLICATE_EMBED VLLM_TRITON_USE_TD VLLM_USE_STANDALONE_COMPILE VLLM_ENABLE_PREGRAD_PASSES "
    "VLLM_USE_BREAKABLE_CUDAGRAPH VLLM_USE_AOT_COMPILE VLLM_USE_BYTECODE_HOOK VLLM_USE_MEGA_AOT_ARTIFACT VLLM_CPU_ATTN_SPLIT_KV "
    "VLLM_DISTRIBUTED_USE_SPLIT_GROUP VLLM_XLA_USE_SPMD VLLM_TRITON_FORCE_FIRST_CONFIG VLLM_SKIP_P2P_CHECK VLLM_DISABLE_PYNCCL "
    "VLLM_USE_LAYERNAME VLLM_USE_V2_MODEL_RUNNER VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR VLLM_FLASHINFER_AUTOTUNE_SKIP_OPS "
    "VLLM_FLASHINFER_ALLREDUCE_BACKEND VLLM_ALLREDUCE_USE_SYMM_MEM VLLM_ALLREDUCE_USE_FLASHINFER VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC "
    "VLLM_TUNED_CONFIG_FOLDER VLLM_DEEPEP_BUFFER_SIZE_MB VLLM_DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE VLLM_DEEPEP_LOW_LATENCY_USE_MNNVL "
    "VLLM_DEEPEP_V2_ALLOW_HYBRID_MODE VLLM_DEEPEP_V2_PREFER_OVERLAP VLLM_DEEPEP_V2_ALLOW_MULTIPLE_REDUCTION VLLM_DBO_COMM_SMS "
    "VLLM_ENABLE_INDUCTOR_MAX_AUTOTUNE VLLM_ENABLE_INDUCTOR_COORDINATE_DESCENT_TUNING VLLM_USE_NCCL_SYMM_MEM "
    "VLLM_DISABLE_SHARED_EXPERTS_STREAM VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD "
    "VLLM_LORA_DISABLE_PDL VLLM_LORA_ENABLE_DUAL_STREAM VLLM_MOE_SKIP_PADDING VLLM_KIMI_K3_SHARD_SP_SHARED_EXPERT "
    "VLLM_KIMI_K3_AUX_ATTN_RES_STREAM VLLM_KIMI_K3_GEMM_AR VLLM_ENABLE_GEMM_RS VLLM_ROCM_USE_AITER_CUSTOM_AR "
    "VLLM_COHERE2_ATTN_MOE_DUAL_STREAM_TOKEN_THRESHOLD VLLM_STEP5_SHARD_SP_SHARED_EXPERT",
    _MEMORY: "VLLM_FASTSAFETENSORS_QUEUE_SIZE VLLM_ZENTORCH_WEIGHT_PREPACK VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY "
    "VLLM_WEIGHT_OFFLOADING_DISABLE_UVA VLLM_WSL2_ENABLE_PIN_MEMORY",
    _WATCHING: "VLLM_GPU_SYNC_CHECK VLLM_PATTERN_MATCH_DEBUG VLLM_DEBUG_DUMP_PATH VLLM_DEBUG_LOG_API_SERVER_RESPONSE "
    "VLLM_USAGE_STATS_SERVER VLLM_NO_USAGE_STATS VLLM_DO_NOT_TRACK VLLM_USAGE_SOURCE VLLM_CONFIGURE_LOGGING VLLM_LOGGING_CONFIG_PATH "
    "VLLM_LOGGING_LEVEL VLLM_LOGGING_STREAM VLLM_LOGGING_PREFIX VLLM_LOGGING_COLOR NO_COLOR FORCE_COLOR VLLM_LOG_STATS_INTERVAL "
    "VLLM_TRACE_FUNCTION VLLM_LOG_BATCHSIZE_INTERVAL VLLM_CUSTOM_SCOPES_FOR_PROFILING VLLM_NVTX_SCOPES_FOR_PROFILING "
    "VLLM_DEBUG_WORKSPACE VLLM_LOG_MODEL_INSPECTION VLLM_DEBUG_MFU_METRICS VLLM_DISABLE_LOG_LOGO VLLM_REQUEST_BODY_LOG_LEVEL",
    _REFUSED: "VLLM_DCP_Q_REPLICATE VLLM_ROCM_AITER_MLA_DCP_VERIFY VLLM_USE_DIRECT_DCP_A2A VLLM_USE_DIRECT_DCP_Q_GATHER "
    "VLLM_USE_DIRECT_DCP_KV_GATHER",
}
"""Environment variables of vLLM, by reason."""


def of_class(name: str) -> frozenset[str]:
    """Fields of the configuration class `name` that shape no block."""
    return frozenset(field for classes in FIELDS.values() for field in classes.get(name, "").split())


def of_environment() -> frozenset[str]:
    """Environment variables of vLLM that shape no block."""
    return frozenset(name for names in ENVIRONMENT.values() for name in names.split())
