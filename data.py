"""`manta.data`: Manta as a stage of a Ray dataset, in the manner of `ray.data.llm`.

    import ray
    from manta.data import MantaEngineProcessorConfig, build_processor

    config = MantaEngineProcessorConfig(
        model_source="models/target",
        engine_kwargs={"speculative_config": {"model": "models/drafter"}},
    )
    processor = build_processor(
        config,
        preprocess=lambda row: {"prompt": row["question"], "sampling_params": {"max_tokens": 64}},
        postprocess=lambda row: {"id": row["id"], "answer": row["generated_text"]},
    )
    processor(ray.data.read_parquet("questions/")).write_parquet("answers/")

The third door to batch work: Ray Data reads and writes, and what it promises holds. Whoever wants every row
exactly once, over any kill, takes `manta batch`. All of it is in `jobs/batch/processor.py`.
"""

from .jobs.batch.processor import MantaEngineProcessorConfig, Processor, build_processor

__all__ = ["MantaEngineProcessorConfig", "Processor", "build_processor"]
