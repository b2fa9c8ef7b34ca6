"""What the sweep over transformers' families does not compare, or not with eager attention."""

from __future__ import annotations

# Why a family is not compared; every other one has to be equal.
LIBRARY = "needs a library that is not installed here: "
VIDEO = "needs a session that tracks objects through a video"
CONVOLUTIONS = "convolutions or recurrence only, no attention"
ASSISTANT = "drafts for another model, from whose keys and values it reads"
SIZES_ARE_TIED = "sizes that depend on each other: no small configuration by hand yet"
REASONS: dict[str, str] = {
    "edgetam": SIZES_ARE_TIED,
    "edgetam_vision_model": SIZES_ARE_TIED,
    "efficientnet": CONVOLUTIONS,
    "pe_audio_video": SIZES_ARE_TIED,
    "pe_audio_video_encoder": SIZES_ARE_TIED,
    "vibevoice_acoustic_tokenizer_decoder": CONVOLUTIONS,
    "vibevoice_acoustic_tokenizer_encoder": CONVOLUTIONS,
    "bark": "three families under one name; none of them calls the attention interface",
    "dinat": LIBRARY + "natten",
    "gemma4_assistant": ASSISTANT,
    "gemma4_unified_assistant": ASSISTANT,
    "glm_image_vqmodel": "a codec without a forward function",
    "layoutlmv2": LIBRARY + "detectron2",
    "pp_ocrv5_mobile_det": CONVOLUTIONS,
    "pp_ocrv5_server_det": CONVOLUTIONS,
    "pp_ocrv6_medium_det": CONVOLUTIONS,
    "pp_ocrv6_small_det": CONVOLUTIONS,
    "qwen2_5_omni": "compared as qwen2_5_omni_thinker",
    "qwen3_omni_moe": "compared as qwen3_omni_moe_thinker",
    "sam3_tracker_video": VIDEO,
    "sam3_video": VIDEO,
    "slanet": "convolutions, and additive attention inside a recurrent cell",
    "t5gemma2_encoder": "compared as a part of t5gemma2",
    "univnet": CONVOLUTIONS,
    "uvdoc": CONVOLUTIONS,
    "vits": "the length of its output depends on the last bit of a duration",
    "voxtral_realtime_text": "transformers names a model class that it does not have",
    "xlstm": CONVOLUTIONS,
}
# Not compared where scipy is not installed, which their loss needs.
NEED_SCIPY = {"eomt", "eomt_dinov3", "inkling_mm_model"}
# Not compared where torchaudio is not installed.
NEED_TORCHAUDIO = ("higgs_audio_v2_tokenizer",)
# Not compared where timm is not installed.
NEED_TIMM = {
    "fast_vlm",
    "gemma3n",
    "gemma3n_vision",
    "perception_lm",
    "timm_backbone",
    "timm_wrapper",
}
# Families whose eager attention is wrong in transformers, so that SDPA is compared: Nemotron's
# speech models fill with -inf the keys that the mask shows, Grounding DINO adds a mask of bools.
# BLT's patches read the outputs of padding, whose queries see no key: eager attention averages the
# values of all keys there, SDPA and flashtile give 0.
EAGER_IS_WRONG = {
    "blt",
    "grounding-dino",
    "mm-grounding-dino",
    "nemotron3_5_asr",
    "nemotron_asr_streaming",
    "nemotron_asr_streaming_encoder",
}
