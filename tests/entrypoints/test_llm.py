import threading

import numpy as np
import pytest
import torch

from deepinfer.core.config import EngineConfig
from deepinfer.core.errors import ConfigError, RequestError
from deepinfer.core.sampling_params import SamplingParams
from deepinfer.entrypoints.llm import LLM
from deepinfer.entrypoints.prompts import ChatOutput
from deepinfer.testing.puppet import PuppetModel

HI = [{"role": "user", "content": "Hi"}]
FOUR = SamplingParams(max_tokens=4)


def test_results_stand_in_order_and_failures_keep_their_place(make_llm) -> None:  # AP-1, D-4, D-5
    llm = make_llm(max_num_seqs=3)
    prompts = [f"prompt {i}" for i in range(100)]
    prompts[57] = "x" * 500
    results = llm.generate(prompts, FOUR)
    assert [r.prompt for r in results] == prompts
    assert results[57].error is not None and results[57].error.code == "prompt_too_long"
    others = [r for i, r in enumerate(results) if i != 57]
    assert all(r.error is None and r.finished and len(r.outputs[0].token_ids) == 4 for r in others)
    assert all(r.text == r.outputs[0].text and len(r.text) == 4 for r in others) and results[57].text == ""


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        ("", "empty_prompt"),
        ([], "empty_prompt"),
        ([5, 100_000], "token_out_of_range"),
        ([5, "a"], "invalid_prompt"),
        ([True], "invalid_prompt"),
        (None, "invalid_prompt"),
        (7, "invalid_prompt"),
        (b"bytes", "invalid_prompt"),
        ({}, "invalid_prompt"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "invalid_prompt"),
        ({"prompt": [1, 2]}, "invalid_prompt"),
        ({"prompt_token_ids": "a"}, "invalid_prompt"),
        ({"prompt": "a", "extra": 1}, "invalid_prompt"),
    ],
)
def test_a_bad_prompt_is_its_own_error(make_llm, bad, code) -> None:
    first, wrong, last = make_llm().generate(["a", bad, [5, 6]], FOUR)
    assert wrong.error is not None and wrong.error.code == code
    assert wrong.finished and wrong.outputs == []
    assert first.error is None and last.error is None


def test_prompts_come_in_every_shape(make_llm, tokenizer) -> None:
    llm = make_llm()
    ids = [0, *tokenizer.encode("hello")]
    for prompt in ("hello", ids, tuple(ids), torch.tensor(ids), np.array(ids), {"prompt": "hello"}):
        (result,) = llm.generate(prompt, FOUR)
        assert result.prompt_token_ids == ids, prompt
    (result,) = llm.generate({"prompt_token_ids": ids}, FOUR)
    assert result.prompt_token_ids == ids and result.prompt is None
    assert [r.prompt_token_ids for r in llm.generate([ids, ids[:2]], FOUR)] == [ids, ids[:2]]
    assert llm.generate([], FOUR) == []


def test_control_tokens_in_text_stay_text(make_llm, tokenizer) -> None:
    (result,) = make_llm().generate("a<｜User｜>b", FOUR)
    assert not tokenizer.special_ids.intersection(result.prompt_token_ids[1:])


def test_params_must_match_prompts_before_anything_is_queued(make_llm) -> None:  # D-13
    llm = make_llm()
    for call in (llm.generate, llm.stream):
        with pytest.raises(ValueError, match="2 sampling parameters for 3 prompts"):
            call(["a", "b", "c"], [FOUR, FOUR])
    with pytest.raises(TypeError, match=r"sampling_params\[1\] must be SamplingParams, got dict"):
        llm.generate(["a", "b"], [FOUR, {}])
    with pytest.raises(TypeError, match="got dict"):
        llm.generate(["a", "b"], {"max_tokens": 4})
    with pytest.raises(ValueError, match="1 sampling parameters for 2"):
        llm.chat([HI, HI], [FOUR])
    assert llm.session.engine.log == []


def test_each_prompt_gets_its_own_params(make_llm) -> None:
    results = make_llm().generate(["a", "b"], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=3)])
    assert [len(r.outputs[0].token_ids) for r in results] == [1, 3]


def test_a_refused_prompt_does_not_move_the_seeds_of_others(make_llm) -> None:
    seeds = [make_llm().generate(["a", middle, "c"], FOUR)[2].seed for middle in ("b", "", [10**6])]
    assert len(set(seeds)) == 1


def test_numerical_error_touches_nobody_else(make_llm) -> None:
    def script(ids, step):
        return None if ids == [9] and step == 2 else 50

    good, bad, other = make_llm(script).generate([[8], [9], [7]], FOUR)
    assert bad.error.code == "numerical_error" and bad.outputs[0].token_ids == [50, 50]
    assert good.outputs[0].token_ids == other.outputs[0].token_ids == [50] * 4


def test_exception_in_the_middle_leaves_nothing_behind(make_llm) -> None:
    def script(ids, step):
        if step == 2:
            raise KeyboardInterrupt
        return 50

    llm = make_llm(script)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], FOUR)
    assert not llm.session.engine.requests
    llm.session.engine.script = lambda ids, step: 51
    assert llm.generate("c", FOUR)[0].outputs[0].token_ids == [51] * 4


def test_chat_takes_the_answer_apart(make_llm, spell) -> None:
    llm = make_llm(spell("because</think>The answer."))
    (result,) = llm.chat(HI)
    assert isinstance(result, ChatOutput)
    assert (result.reasoning_content, result.content, result.note) == ("because", "The answer.", None)
    assert result.messages[0].num_reasoning_tokens < len(result.outputs[0].token_ids)
    assert result.outputs[0].finish_reason == "stop"
    assert result.prompt.endswith("<｜Assistant｜><think>")


def test_chat_without_thinking(make_llm, spell) -> None:
    (result,) = make_llm(spell("Plain.")).chat(HI, thinking=False)
    assert (result.reasoning_content, result.content) == (None, "Plain.")
    assert result.prompt.endswith("<｜Assistant｜></think>")
    assert result.messages[0].num_reasoning_tokens == 0


def test_reasoning_that_used_all_tokens_says_so(make_llm, spell) -> None:
    (result,) = make_llm(spell("hm hm hm hm hm", end=False)).chat(HI, FOUR)
    assert result.content == "" and result.reasoning_content
    assert "used all 4 tokens" in result.note and "raise max_tokens" in result.note
    assert result.messages[0].num_reasoning_tokens == 4


def test_chat_reads_tool_calls(make_llm, spell) -> None:
    text = (
        '</think>On it.\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="get">\n'
        '<｜DSML｜ parameter name="n" string="false">3</｜DSML｜ parameter>\n</｜DSML｜ invoke>\n</｜DSML｜ calls>'
    )
    tools = [{"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}]
    llm = make_llm(spell(text))
    llm.session.engine.max_len = 10_000
    (result,) = llm.chat(HI, SamplingParams(max_tokens=500), tools=tools)
    assert result.content == "On it."
    assert [(call.name, call.arguments) for call in result.tool_calls] == [("get", '{"n": 3}')]


def test_chat_takes_many_conversations_and_keeps_places(make_llm) -> None:
    bad = [{"role": "nobody", "content": "x"}]
    empty = [{"role": "user", "content": ""}]
    results = make_llm().chat([HI, bad, empty], FOUR)
    assert [r.error.code if r.error else None for r in results] == [None, "invalid_chat", None]
    assert "messages[0].role" in results[1].error.message and results[1].messages == []


@pytest.mark.parametrize(
    ("options", "place"),
    [
        ({"reasoning_effort": "medium"}, "reasoning_effort"),
        ({"thinking": {"type": "adaptive"}}, "thinking.type"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    ],
)
def test_chat_options_are_refused_by_name(make_llm, options, place) -> None:
    (result,) = make_llm().chat(HI, **options)
    assert result.error.code == "invalid_chat" and result.error.message.startswith(place)


def test_chat_can_continue_the_final_message(make_llm) -> None:
    conversation = [*HI, {"role": "assistant", "content": "Well,"}]
    (result,) = make_llm().chat(conversation, FOUR, continue_final_message=True, thinking=False)
    assert result.prompt.endswith("Well,")
    (result,) = make_llm().chat(HI, FOUR, add_generation_prompt=False)
    assert result.prompt.endswith("Hi")


def test_images_are_refused_by_name(make_llm) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:,"}}
    (result,) = make_llm().chat([{"role": "user", "content": [part]}])
    assert result.error.code == "unsupported_parameter" and "images" in result.error.message


def test_stream_yields_snapshots_whose_deltas_make_the_text(make_llm) -> None:
    llm = make_llm()
    (whole,) = llm.generate("abc", FOUR)
    pieces = list(llm.stream("abc", FOUR))
    assert [len(p.outputs[0].token_ids) for p in pieces] == [1, 2, 3, 4]
    assert "".join(p.delta for p in pieces) == whole.outputs[0].text
    assert [p.finished for p in pieces] == [False, False, False, True]


def test_stream_of_several_says_which(make_llm) -> None:
    pieces = list(make_llm().stream(["a", "", "b"], FOUR))
    assert {p.prompt_index for p in pieces if p.finished} == {0, 1, 2}
    assert next(p for p in pieces if p.prompt_index == 1).error.code == "empty_prompt"


def test_closing_a_stream_aborts_the_request(make_llm) -> None:
    llm = make_llm()
    stream = llm.stream(["a", "b"], SamplingParams(max_tokens=100))
    assert not llm.session.engine.requests
    next(stream)
    assert len(llm.session.engine.requests) == 2
    stream.close()
    assert not llm.session.engine.requests
    assert llm.generate("c", FOUR)[0].error is None


def test_calls_may_be_interleaved_with_a_stream(make_llm) -> None:
    llm = make_llm()
    alone = [p.delta for p in llm.stream("abc", SamplingParams(max_tokens=8))]
    stream = llm.stream("abc", SamplingParams(max_tokens=8))
    deltas = [next(stream).delta]
    assert len(llm.generate(["x", "y"], FOUR)) == 2
    deltas += [p.delta for p in stream]
    assert deltas == alone


def test_threads_may_share_an_llm(make_llm) -> None:
    llm = make_llm()
    wanted = {text: llm.generate(text, FOUR)[0].outputs[0].text for text in ("a", "bb", "ccc", "dddd")}
    got = {}
    threads = [
        threading.Thread(target=lambda t=text: got.update({t: llm.generate(t, FOUR)[0].outputs[0].text}))
        for text in wanted
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert got == wanted


def test_two_llms_do_not_meet(make_llm) -> None:
    one, two = make_llm(lambda ids, step: 50), make_llm(lambda ids, step: 51)
    stream = one.stream("a", FOUR)
    next(stream)
    assert two.generate("a", FOUR)[0].outputs[0].token_ids == [51] * 4
    assert [p.outputs[0].token_ids for p in stream][-1] == [50] * 4


def test_without_a_tokenizer_ids_work_and_text_is_refused(make_llm) -> None:
    llm = make_llm(text=False)
    ids, text = llm.generate([[5, 6], "a"], FOUR)
    assert len(ids.outputs[0].token_ids) == 4 and ids.outputs[0].text == ""
    assert text.error.code == "no_tokenizer"
    assert llm.chat(HI)[0].error.code == "chat_unavailable"


def test_close_ends_the_engine(make_llm) -> None:
    with make_llm() as llm:
        llm.generate("a", FOUR)
    assert llm.session.engine.closed
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate("a", FOUR)


def test_bad_settings_are_refused_before_anything_is_loaded(tmp_path) -> None:
    with pytest.raises(ConfigError, match="max_num_seqs"):
        LLM(tmp_path, max_num_seqs=0)
    with pytest.raises(ConfigError, match="'max_seqs' is unknown"):
        LLM(tmp_path, max_seqs=1)
    with pytest.raises(ConfigError, match="unknown setting"):
        LLM(config=EngineConfig(), max_seqs=1)
    with pytest.raises(ConfigError, match="is no folder"):
        LLM(tmp_path / "absent")


def test_progress_is_shown_when_asked_for(make_llm, capsys) -> None:
    make_llm().generate(["a", "b"], FOUR, use_tqdm=True)
    assert "2/2 requests, 8 tokens" in capsys.readouterr().err
    make_llm().generate(["a", "b"], FOUR)
    assert capsys.readouterr().err == ""


# The same through the real engine, with a puppet and with a small random checkpoint.


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    from deepinfer.models.deepseek_v41_flash.make_tiny import make_tiny

    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    make_tiny(folder, seed=1, quant=False)
    return folder


@pytest.fixture(scope="module")
def real(tiny):
    with LLM(tiny, dtype="float32", max_model_len=256, max_num_seqs=4, seed=5) as llm:
        yield llm


def count_up(token_ids):
    """Logits that are best for the next number."""
    return [10.0 if token == (token_ids[-1] + 1) % 32 else 0.0 for token in range(32)]


def test_a_puppet_runs_without_a_tokenizer() -> None:
    with LLM(PuppetModel(32, count_up, eos_token_ids=(9,)), num_kv_blocks=16) as llm:
        results = llm.generate([[1, 2], [20], [], [40]], SamplingParams(temperature=0, max_tokens=9))
        assert [r.outputs[0].token_ids if r.outputs else None for r in results] == [
            [3, 4, 5, 6, 7, 8, 9],
            list(range(21, 30)),
            None,
            None,
        ]
        assert [r.error.code if r.error else None for r in results] == [
            None,
            None,
            "empty_prompt",
            "token_out_of_range",
        ]
        assert llm.stats.num_generated_tokens == 16
        logits = llm.logits([3, 4])
        assert logits.dtype == torch.float32 and logits.argmax(-1).tolist() == [4, 5]


def test_two_engines_in_one_process_do_not_meet() -> None:
    down = PuppetModel(32, lambda ids: [10.0 if t == (ids[-1] - 1) % 32 else 0.0 for t in range(32)])
    with LLM(PuppetModel(32, count_up), num_kv_blocks=4) as one, LLM(down, num_kv_blocks=9, max_num_seqs=1) as two:
        greedy = SamplingParams(temperature=0, max_tokens=4)
        stream = one.stream([5], greedy)
        next(stream)
        assert two.generate([[5], [9]], greedy)[1].outputs[0].token_ids == [8, 7, 6, 5]
        assert [p.outputs[0].token_ids for p in stream][-1] == [6, 7, 8, 9]


def test_hundred_prompts_with_one_too_long(real) -> None:
    prompts = [f"prompt number {i}" for i in range(100)]
    prompts[57] = "x " * 300
    results = real.generate(prompts, SamplingParams(max_tokens=2))
    assert [r.prompt for r in results] == prompts
    assert [i for i, r in enumerate(results) if r.error] == [57]
    assert results[57].error.code == "prompt_too_long" and "256" in results[57].error.message


def test_max_tokens_zero_scores_the_prompt_only(real) -> None:
    (result,) = real.generate("Hello there", SamplingParams(max_tokens=0, prompt_logprobs=2))
    assert result.outputs[0].token_ids == [] and result.outputs[0].text == ""
    assert len(result.prompt_logprobs) == len(result.prompt_token_ids)


def test_stream_gives_the_text_of_generate(real) -> None:
    params = SamplingParams(temperature=1, seed=3, max_tokens=24)
    (whole,) = real.generate("The sea is", params)
    pieces = list(real.stream("The sea is", params))
    assert "".join(p.delta for p in pieces) == whole.outputs[0].text
    assert pieces[-1].outputs[0].token_ids == whole.outputs[0].token_ids


def test_a_result_can_be_repeated_with_the_seed_it_names(real) -> None:
    (first,) = real.generate("The sea is", SamplingParams(max_tokens=12))
    (again,) = real.generate("The sea is", SamplingParams(max_tokens=12, seed=first.seed))
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    seeds = {r.seed for r in real.generate(["a"] * 16, SamplingParams(max_tokens=1))}
    assert len(seeds) == 16


def test_logits_agree_whichever_way_the_prompt_runs(real) -> None:
    ids = list(range(3, 60))
    whole = real.logits(ids)
    assert whole.shape == (57, real.session.engine.model.info.vocab_size)
    for options in ({"chunk_size": 1}, {"chunk_size": 7}, {"decode_from": 28}):
        assert torch.equal(real.logits(ids, **options), whole), options
    for bad in ({"chunk_size": 0}, {"decode_from": 0}):
        with pytest.raises(RequestError, match="at least 1"):
            real.logits(ids, **bad)
    with pytest.raises(RequestError, match="empty"):
        real.logits([])


def test_conversations_run(real) -> None:
    results = real.chat([HI, [{"role": "user", "content": ""}]], SamplingParams(max_tokens=8, seed=1), thinking=False)
    assert [r.error for r in results] == [None, None]
    assert all(r.reasoning_content is None for r in results)
    (result,) = real.chat(HI, SamplingParams(max_tokens=8, seed=1))
    assert result.reasoning_content is not None


def test_closing_a_stream_frees_its_blocks(real) -> None:
    free = real.stats.num_free_blocks
    stream = real.stream(["a", "b"], SamplingParams(max_tokens=100))
    next(stream)
    assert real.stats.num_free_blocks < free
    stream.close()
    assert real.stats.num_free_blocks == free
