# SPDX-License-Identifier: Apache-2.0
"""What of vLLM's configuration shapes the bytes of a block: the other list is `kvbm_cxl.vllm_integration.harmless_settings`."""

# Fields of vLLM 0.31 to 0.33 that shape blocks, by configuration class. One that is neither here nor in `harmless_settings` is not read.
SHAPE = {
    "VllmConfig": "model_config cache_config parallel_config scheduler_config device_config load_config attention_config mamba_config "
    "kernel_config lora_config diffusion_config quant_config compilation_config additional_config",
    "ModelConfig": "runner convert trust_remote_code dtype hf_text_config is_submodel_config code_revision quantization "
    "quantization_config disable_sliding_window model_class_overrides model_impl multimodal_config",
    "CacheConfig": "cache_dtype sliding_window kv_cache_dtype_skip_layers mamba_cache_dtype mamba_ssm_cache_dtype replayssm_buffer_len "
    "use_replayssm use_kda_recoverssm kv_sharing_fast_prefill swa_bounded_replay",
    "ParallelConfig": "worker_cls sd_worker_cls worker_extension_cls",
    "SchedulerConfig": "",
    "DeviceConfig": "device_type",
    "LoadConfig": "ignore_patterns",
    "AttentionConfig": "use_trtllm_attention disable_flashinfer_q_quantization use_prefill_query_quantization indexer_kv_dtype "
    "indexer_sparse_logits hisparse_config use_non_causal trtllm_ragged_backend",
    "HiSparseConfig": "device_buffer_size eager_host_mirror",
    "MambaConfig": "enable_stochastic_rounding stochastic_rounding_philox_rounds",
    "KernelConfig": "moe_backend linear_backend linear_backend_per_quant monokernel",
    "LoRAConfig": "target_modules enable_tower_connector_lora enable_mixed_moe_lora_format enable_moe_shared_loras",
    "DiffusionConfig": "canvas_length max_denoising_steps",
    "SpeculativeConfig": "quantization moe_backend kv_cache_dtype code_revision index_share_for_mtp_iteration disable_eagle_block_drop "
    "use_heterogeneous_vocab parallel_drafting draft_model_config draft_load_config",
    "MultiModalConfig": "language_model_only media_io_kwargs mm_processor_kwargs mm_device_do_normalize mm_encoder_only "
    "mm_encoder_attn_dtype mm_encoder_fp8_scale_path video_pruning_rate video_pruning_method",
    "CompilationConfig": "inductor_passes",
    "QuantizationConfigArgs": "linear moe ignore targets",
    "QuantSpec": "weight activation",
    "QuantKey": "dtype scale scale2 symmetric",
    "ScalarType": "exponent mantissa signed bias _finite_values_only nan_repr",
    "ScaleDesc": "dtype static group_shape",
}
# Environment variables of vLLM 0.31 to 0.33 that may shape blocks: by name precisions, quantized activations, other models, other media.
SHAPE_ENVIRONMENT = """
VLLM_FLOAT32_MATMUL_PRECISION VLLM_CPU_INT4_W4A8 VLLM_VIDEO_LOADER_BACKEND VLLM_PLUGINS VLLM_USE_TRITON_AWQ VLLM_DISABLED_KERNELS
VLLM_USE_HW_AGNOSTIC VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE VLLM_GDN_DECODE_KERNEL VLLM_USE_OINK_OPS
VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD VLLM_ROCM_USE_AITER VLLM_ROCM_USE_AITER_LINEAR
VLLM_ROCM_USE_AITER_LINEAR_HIPBMM VLLM_ROCM_USE_AITER_MOE VLLM_ROCM_USE_AITER_MOE_SITUV2 VLLM_ROCM_AITER_MOE_DISPATCH_POLICY
VLLM_ROCM_USE_AITER_RMSNORM VLLM_ROCM_USE_AITER_MLA VLLM_ROCM_AITER_MLA_ASM_PADDING VLLM_ROCM_USE_AITER_MHA
VLLM_ROCM_USE_AITER_FP4_ASM_GEMM VLLM_ROCM_USE_AITER_TRITON_ROPE VLLM_ROCM_USE_AITER_FP8BMM VLLM_ROCM_USE_AITER_FP4BMM
VLLM_ROCM_USE_AITER_UNIFIED_ATTENTION VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS VLLM_ROCM_USE_AITER_TRITON_GEMM
VLLM_ROCM_USE_SKINNY_GEMM VLLM_ROCM_FP8_PADDING VLLM_ROCM_MOE_PADDING VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT
VLLM_ROCM_QUICK_REDUCE_QUANTIZATION VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16 VLLM_ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB
VLLM_ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB VLLM_ROCM_FP8_MFMA_PAGE_ATTN VLLM_MLA_DISABLE
VLLM_MARLIN_USE_ATOMIC_ADD VLLM_MARLIN_INPUT_DTYPE VLLM_HUMMING_ONLINE_QUANT_CONFIG VLLM_HUMMING_INPUT_QUANT_CONFIG
VLLM_HUMMING_USE_F16_ACCUM VLLM_HUMMING_MOE_GEMM_TYPE VLLM_DEEPEPLL_NVFP4_DISPATCH VLLM_USE_DEEP_GEMM VLLM_MOE_USE_DEEP_GEMM
VLLM_USE_DEEP_GEMM_E8M0 VLLM_USE_DEEP_GEMM_TMA_ALIGNED_SCALES VLLM_USE_FUSED_MOE_GROUPED_TOPK VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER
VLLM_B12X_MOE_FP4_FORCE_A16 VLLM_USE_FLASHINFER_MOE_INT4 VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE VLLM_MOE_ROUTING_SIMULATION_STRATEGY
VLLM_SSM_CONV_STATE_LAYOUT VLLM_DISABLE_DSV4_MEGAMOE_SHARED_EXPERT_FUSION VLLM_XPU_FORCE_N_CONTIG_WEIGHT VLLM_XPU_INC_WNA16_BACKEND
VLLM_ENABLE_HPC_OPS VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE VLLM_ROCM_MUSE_MOE_ONLINE_QUANT VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE
VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4 VLLM_ROCM_USE_AITER_TRITON_SPARSE_MLA VLLM_ROCM_AITER_MEGA_MOE_FUSE_SHARED_EXPERTS VLLM_ROCM_MONO_DECODE
"""
