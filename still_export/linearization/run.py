"""A linearization run: data, model and stages. Each stage starts from the base and the previous stage's results."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from still_export.errors import ConfigError
from still_export.linearization import adapter
from still_export.linearization.budget import BROKEN, MET, UNMEASURED, Budget
from still_export.linearization.folder import rehearse_save, save_model
from still_export.linearization.losses import cross_entropy as per_token
from still_export.linearization.objectives import FinetuneObjective, TransferObjective, make_students
from still_export.linearization.recipe import NO_LINEAR_PART, Recipe
from still_export.linearization.run_folder import RunFolder
from still_export.linearization.trainer import Progress, StageReport, Trainer
from still_export.mixers.config import StillConfig
from still_export.mixers.hybrid_attention.module import HybridOpModule
from still_export.mixers.layers import FULL, WINDOWED
from still_export.mixers.trainable import SOFTMAX, STUDENT, Trainable, attention_mode, fuse_layers
from still_export.models.load import load_model, load_tokenizer, open_source
from still_export.package.staging import staged_folder
from still_export.texts.everyday import Everyday, Question, compared
from still_export.texts.forms import NaturalWriter
from still_export.texts.replies import everyday_replies, fitting
from still_export.texts.tasks import TaskWriter, Weighing
from still_export.texts.texts import Batches, Corpus, held_out_rows, read_chats, read_corpus
from still_export.texts.turns import turn_pieces
from still_kernels.hybrid_attention.call import refusals

REPORT_FILE = "linearize.json"
FRESH_GATE_BIAS = 2.0
"""Initial bias of trained gates: sigmoid(2) = 0.88. Untrained gates have 8, which is 1 in bfloat16 with derivative 0."""

FIT_TOKENS, MOST_FIT_TOKENS = 32, 1 << 15
"""Tokens per hidden channel for fitting new layers (their regressions have one coefficient per channel), and most tokens in all, for
memory."""


@dataclass
class Linearization:
    """The result of `linearize`.

    bits_per_byte: Of the held-out text by the teacher, the student after stage 1 without LoRA (if known), and the student.
    stages: Report of each stage that ran.
    plan: A budget's promises and results; None: there was no budget.
    everyday: Replies of the written model to everyday questions beside the base's.
    """

    folder: Path
    bits_per_byte: dict[str, float]
    stages: list[StageReport]
    plan: dict[str, Any] | None = None
    everyday: Everyday | None = None

    @property
    def promised(self) -> float:
        """Share of the base's right everyday answers that was promised."""
        return self.plan["everyday"] if self.plan else Budget().everyday

    @property
    def promises(self) -> dict[str, str]:
        """Each promise as met, NOT met or NOT MEASURED."""
        share = None if self.everyday is None else self.everyday.share
        kept = UNMEASURED if share is None else MET if share >= self.promised else BROKEN
        return {**(self.plan["promises"] if self.plan else {}), "everyday": kept}

    @property
    def said(self) -> list[str]:
        """The verdict in words, first what was not met."""
        broken = [name for name, verdict in self.promises.items() if verdict == BROKEN]
        asked = self.plan["budget"] if self.plan else f"everyday {self.promised:.0%}"
        lines = [f"NOT met: {', '.join(broken)}. Promised: {asked}."] if broken else []
        lines += [self.everyday.said()] if self.everyday else []
        lines += [self.plan["said"]] if self.plan else []
        others = ", ".join(f"{name} {verdict}" for name, verdict in self.promises.items())
        return [*lines, f"Promised {asked}: {others}"]

    def to_dict(self) -> dict[str, Any]:
        stages = [asdict(stage) for stage in self.stages]
        met = all(verdict == MET for verdict in self.promises.values())
        plan = {"plan": {**self.plan, "promises": self.promises, "met": met, "said": self.said}} if self.plan else {}
        everyday = {"everyday": asdict(self.everyday)} if self.everyday else {}
        return {"bits_per_byte": self.bits_per_byte, "stages": stages, "promises": self.promises, **everyday, **plan}


class LinearizationRun:
    """One run: its folder, data and model. Each stage starts from the base and the previous stage's results."""

    def __init__(
        self, recipe: Recipe, output: Path, accelerator: Accelerator, progress: Progress, log: Callable[[str], None]
    ) -> None:
        self.started = time.monotonic()
        self.output, self.accelerator = output, accelerator
        self.progress, self.log = progress, log
        self.folder = RunFolder(output)
        self.questions: int | None = None  # everyday questions to ask; None: all
        self.work = self.folder.work
        self.tokenizer = load_tokenizer(recipe.tokenizer or recipe.base)
        log("reading the base model")
        geometry = open_source(
            recipe.base, attach_untrained=True
        ).config  # weights are loaded later, with the recipe's layers
        self.context = recipe.capacity_tokens or int(geometry.max_position_embeddings)
        recipe = recipe.fitted(self.context)
        self.geometry, self.layers, self.heads = geometry, geometry.num_hidden_layers, geometry.num_attention_heads
        self.replaceable = [i for i in range(self.layers) if geometry.still.layer_type(i) != WINDOWED]
        if not self.replaceable:
            raise ConfigError(f"{recipe.base}: each layer has a window of its own, so there is nothing to linearize.")
        self.start = adapter.Start(recipe) if recipe.start else None
        self.adopt(recipe)
        model = self.load_base()
        rehearse_save(model, self.tokenizer)
        self.base_weights = weights_digest(model)
        for file, found in recipe.found(self.layers):
            found.check(file, self.base_weights)
        log(
            "tokenizing the texts"
            if recipe.texts
            else "no --text: training on Python's documentation, 0.7 MB of English with code"
        )
        self.corpus: Corpus = read_corpus(recipe.texts, self.tokenizer, int(model.config.vocab_size), recipe.held_out)
        self.chats = []
        if recipe.chat_file:
            self.chats = read_chats(recipe.chat_file, self.tokenizer, int(model.config.vocab_size))
        self.held_out = held_out_rows(self.corpus, recipe.validation_rows, recipe.row_tokens)

    def adopt(self, recipe: Recipe) -> None:
        """Continue with `recipe`, which has other layers or sizes."""
        self.recipe, self.still = recipe, recipe.still_config(self.layers, self.heads)
        if len(self.replaceable) < self.layers and len(self.still.layer_types or ()) in (0, self.layers):
            # The family's windows, by name, as config.json will have them.
            softmax = [i for i in self.replaceable if self.still.layer_type(i) == FULL]
            self.still = replace(self.still, layer_types=self.types(softmax))
        if self.start and recipe.window_factors is None:
            self.still = replace(self.still, window_factors=self.start.window_factors(self.still, self.layers))
        if recipe.window_factor_scale != 1:
            rows = self.still.window_factors or ((1.0,) * self.heads,) * self.layers
            scaled = tuple(tuple(factor * recipe.window_factor_scale for factor in row) for row in rows)
            self.still = replace(self.still, window_factors=scaled)

    def types(self, softmax: Sequence[int]) -> tuple[str, ...]:
        """Types of all layers if those with the numbers `softmax` stay softmax; windows of the base's own stay."""
        linear = self.recipe.layer
        found = [linear if i in self.replaceable else WINDOWED for i in range(self.layers)]
        return tuple(FULL if i in softmax else kind for i, kind in enumerate(found))

    @property
    def described(self) -> str:
        """The number of layers that could stay softmax, in words."""
        windows = self.layers - len(self.replaceable)
        kept = f" ({windows} more keep the base's window)" if windows else ""
        return f"{len(self.replaceable)} layers{kept}"

    def load_base(self) -> Any:
        """The base with untrained linear layers, or with those of the starting adapter; float32, frozen."""
        model = load_model(self.recipe.base, attach_untrained=True, still_config=self.still, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(False)
            if name.endswith(".g_proj.bias"):
                parameter.fill_(FRESH_GATE_BIAS)
            if ".feature_" in name and self.recipe.feature_map == NO_LINEAR_PART:
                parameter.zero_()
        if self.accelerator.device.type == "cuda":
            demand_kernels(model)
        if self.start:
            adapter.load_tensors(model, self.start.still_tensors())
        return model

    def fingerprint(self) -> dict[str, Any]:
        """Values that must be equal to resume a run."""
        values = self.recipe.to_dict()
        for name in (
            *("device", "checkpoint_every", "micro_batch_size", "gradient_checkpointing", "precision"),
            *("adapter_dtype", "texts", "base", "tokenizer", "start", "chat_file", "everyday_questions"),
        ):
            del values[name]
        tokens = hashlib.sha256(self.corpus.train.tobytes())
        for chat in self.chats:
            tokens.update(chat.tobytes())
        return {**values, "training_tokens_sha256": tokens.hexdigest(), "base_weights": self.base_weights}

    def open_folder(self, resume: bool, force: bool) -> None:
        """Create the output folder, or check that its run is this one; errors: see RunFolder."""
        if resume:
            self.folder.resume(self.fingerprint())
        elif self.accelerator.is_main_process:
            self.folder.begin(self.fingerprint(), force)
        self.accelerator.wait_for_everyone()

    def batches(self, retrieval: float) -> Batches:
        """The training batches with a share of retrieval rows."""
        recipe = self.recipe
        natural = None
        if recipe.natural:
            natural = NaturalWriter(self.tokenizer, self.corpus.train, turn_pieces(self.tokenizer))
        return Batches(
            self.corpus,
            TaskWriter(self.tokenizer, self.corpus.train),
            recipe.batch_size,
            recipe.row_tokens,
            recipe.seed,
            retrieval,
            Weighing(recipe.answer_weight, recipe.answer_share),
            natural=natural,
            natural_share=recipe.natural,
            chats=self.chats,
            chat_share=recipe.chat,
            lengths=recipe.row_lengths,
        )

    def validate(self, module: nn.Module) -> float:
        """Loss of the held-out rows."""
        losses = []
        with torch.no_grad(), self.accelerator.autocast():
            for row in self.held_out.to(self.accelerator.device):
                losses.append(float(module(row[None], torch.ones_like(row[None], dtype=torch.float32))[0]))
        return sum(losses) / len(losses)

    def transfer_objective(self) -> TransferObjective:
        """Stage 1's objective with the parameters that it trains."""
        recipe = self.recipe
        model = self.load_base()
        attentions = make_students(model, recipe.learn_window_factors)
        for attention in attentions:
            attention.save_memory = recipe.gradient_checkpointing
        set_seed(recipe.seed)  # LoRA starts the same, regardless of earlier measurements
        model = self.attach_lora(model) if recipe.lora_in_transfer else model
        for _, parameter in adapter.still_parameters(model, gate_weights=not recipe.low_rank_gates):
            parameter.requires_grad_(True)
        new = self.start.new_layers(self.still, self.layers) if self.start else []
        if new:  # the other layers were trained with the adapter's LoRA, and stay
            for name, parameter in model.named_parameters():
                if not any(f".layers.{i}." in name for i in new):
                    parameter.requires_grad_(False)
        fuse_layers(model, self.accelerator.device)
        known = [a for a in attentions if new and a.layer_idx not in new]
        return TransferObjective(model, [a for a in attentions if a not in known], known)

    def transfer(self) -> StageReport:
        """Run stage 1; writes training/transfer.safetensors."""
        recipe, objective = self.recipe, self.transfer_objective()
        self.log(f"stage 1, attention transfer: {_count(objective):,} parameters in {len(objective.attentions)} layers")
        batches = self.batches(recipe.retrieval)
        self.fit(objective, batches)
        trainer = Trainer(self.accelerator, recipe, "transfer", self.work, self.progress)
        report = trainer.train(
            objective,
            batches,
            recipe.transfer_steps,
            lambda name: recipe.finetune_rate if "lora_" in name else recipe.transfer_rate,
            self.validate,
        )
        self._keep("transfer", objective)
        return report

    @property
    def fits(self) -> bool:
        """Whether new layers start in closed form; layers of an adapter do not."""
        known = self.start is not None and not self.start.new_layers(self.still, self.layers)
        return self.recipe.lora_in_transfer and not known

    @property
    def fit_shape(self) -> tuple[int, int]:
        """Returns (rows, tokens per row) for fitting new layers; the longest rows are used."""
        length = max(self.recipe.row_lengths or (self.recipe.row_tokens,))
        return math.ceil(min(FIT_TOKENS * self.geometry.hidden_size, MOST_FIT_TOKENS) / length), length

    def fit(self, objective: TransferObjective, batches: Batches) -> None:
        """Start new layers near the teacher's outputs, if they support it."""
        if not self.fits:
            return
        (wanted, length), rows, step = self.fit_shape, list[Tensor](), 0
        while len(rows) < wanted:
            ids = batches.batch(step).ids
            rows += ids if ids.shape[1] == length else ()
            step += 1
        self.log(f"start in closed form: {len(objective.attentions)} layers, {wanted} rows of {length:,} tokens")
        objective.to(self.accelerator.device).fit(torch.stack(rows[:wanted]).to(self.accelerator.device))

    def student(self, maps: Path | None) -> tuple[Any, list[Trainable]]:
        """The model with LoRA after stage 1, and its linearized layers.

        Args:
            maps: Parameters from stage 1; None: there are none.
        """
        recipe = self.recipe
        model = self.load_base()
        attentions = make_students(model, recipe.learn_window_factors)
        trained = {} if maps is None else load_file(maps)
        model.load_state_dict(trained, strict=False)
        set_seed(recipe.seed)  # LoRA starts the same whether or not stage 1 ran in this process
        if recipe.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
            model.enable_input_require_grads()
            model.train()
        own = adapter.still_parameters(
            model, gate_weights=not recipe.low_rank_gates
        )  # PEFT renames some parameters, and freezes all
        model = self.attach_lora(model)
        adapter.load_lora(model, trained)
        for _, parameter in own if recipe.maps_in_finetune else ():
            parameter.requires_grad_(True)
        return model, attentions

    def finetune_objective(self, maps: Path | None) -> FinetuneObjective:
        """Stage 2's objective: the model with LoRA and the parameters that it trains; `maps`: see `student`."""
        recipe = self.recipe
        model, attentions = self.student(maps)
        for name, parameter in model.named_parameters():
            if name.endswith(adapter.FACTORS):
                parameter.requires_grad_(True)
        fuse_layers(model, self.accelerator.device)
        return FinetuneObjective(
            model,
            attentions,
            recipe.loss,
            recipe.selection_weight,
            answer_loss=recipe.answer_loss,
            per_answer=recipe.answer_share > 0,
            selection_target=recipe.selection_target,
        )

    def finetune(self, until: float = math.inf) -> tuple[StageReport | None, Any, list[Trainable]]:
        """Run stage 2 until the monotonic time `until`; writes training/finetune.safetensors. Returns (report, model with LoRA, its
        layers)."""
        recipe = self.recipe
        maps = self.work / "transfer.safetensors" if recipe.transfer_steps else None
        if not recipe.finetune_steps:
            if self.start or recipe.lora_in_transfer:
                model, attentions = self.student(maps)
                return None, model.to(self.accelerator.device), attentions
            model = self.load_base()
            attentions = make_students(model, recipe.learn_window_factors)
            if maps is not None:
                model.load_state_dict(load_file(maps), strict=False)
            return None, model.to(self.accelerator.device), attentions
        objective = self.finetune_objective(maps)
        batches = self.batches(recipe.retrieval)
        if maps is None:
            self.fit(TransferObjective(objective.model, objective.attentions), batches)
        self.log(f"stage 2, LoRA: {_count(objective):,} parameters, loss {recipe.loss}")
        trainer = Trainer(self.accelerator, recipe, "finetune", self.work, self.progress)
        report = trainer.train(
            objective,
            batches,
            recipe.finetune_steps,
            lambda name: recipe.transfer_rate if name.endswith(adapter.FACTORS) else recipe.finetune_rate,
            self.validate,
            until,
        )
        self._keep("finetune", objective)
        if isinstance(objective, FSDPModule):
            # From here on the model is called without the objective: layers gather their own parameters, but not the objective's.
            objective.unshard()
        return report, objective.model.eval(), objective.attentions

    def attach_lora(self, model: Any) -> Any:
        """`model` with LoRA, new or from the starting adapter."""
        model = adapter.attach_lora(model, self.recipe)
        if self.start:
            self.start.load_lora(model)
        return model

    def _keep(self, stage: str, objective: nn.Module) -> None:
        tensors = {n: t.cpu().contiguous() for n, t in adapter.trained_tensors(objective).items()}
        if self.accelerator.is_main_process:
            save_file(tensors, self.work / f"{stage}.safetensors")
        self.accelerator.wait_for_everyone()

    @torch.no_grad()
    def quality(self, model: Any, attentions: list[Trainable]) -> dict[str, float]:
        """Bits per byte of the held-out rows: teacher, after stage 1 if known, after stage 2."""
        finetuned = hasattr(model, "disable_adapter")
        rows = self.held_out.to(self.accelerator.device)

        def bits(mode: str) -> float:
            with attention_mode(attentions, mode), self.accelerator.autocast():
                losses = [cross_entropy(model(row[None], use_cache=False).logits, row[None]) for row in rows]
            return sum(losses) / len(losses) / math.log(2) / self.corpus.bytes_per_token

        def without_lora(mode: str) -> float:
            if not finetuned:
                return bits(mode)
            with model.disable_adapter():
                return bits(mode)

        result = {"teacher": without_lora(SOFTMAX)}
        if not self.recipe.maps_in_finetune:  # stage 1's parameters are unchanged if only LoRA was trained after it
            result["after attention transfer"] = without_lora(STUDENT)
        if finetuned:
            result["after LoRA"] = bits(STUDENT)
        return result

    def everyday_replies(self, model: Any, wanted: Sequence[Question]) -> list[str]:
        """A model's replies to everyday questions."""
        model = model.to(self.accelerator.device, torch.float32).eval()
        found = everyday_replies(model, self.tokenizer, wanted) if wanted else []
        model.to("cpu")
        return found

    def write(self, result: Linearization, command: str) -> None:
        """Write adapter (unless empty), model, tokenizer and report atomically; the work folder stays."""
        tensors: dict[str, Tensor] = dict(self.start.tensors) if self.start else {}
        for stage in result.stages:
            tensors.update(load_file(self.work / f"{stage.name}.safetensors"))
        if not tensors:
            tensors = {n: p.detach() for n, p in adapter.still_parameters(self.load_base())}
        softmax = [
            i for i in range(self.layers) if self.still.layer_type(i) == FULL
        ]  # layers that became softmax after others were trained
        tensors = {n: t for n, t in tensors.items() if not any(f".layers.{i}." in n for i in softmax)}
        still = adapter.take_window_factors(tensors, self.still, self.layers, self.heads)
        most = self.questions if self.recipe.everyday_questions is None else self.recipe.everyday_questions
        wanted = fitting(self.tokenizer, self.context, most)
        self.log(f"asking {len(wanted)} everyday questions")
        full = StillConfig(layer_types=(FULL,) * self.layers)
        # Asked first, so that base and model need not be in memory together.
        base = self.everyday_replies(
            load_model(self.recipe.base, attach_untrained=True, still_config=full, dtype=torch.float32), wanted
        )
        self.log("writing the model")
        with staged_folder(self.output, force=True, keep=self.folder.other_entries) as folder:
            if tensors:
                adapter.save_adapter(folder / "adapter", tensors, still, self.recipe)
                model = adapter.apply_adapter(self.recipe.base, folder / "adapter")
            else:  # nothing was trained, and the layers have no parameters of their own
                model = load_model(self.recipe.base, attach_untrained=True, still_config=still)
            save_model(model, self.tokenizer, folder)
            result.everyday = compared(wanted, self.everyday_replies(model, wanted), base)
            content = {"command": command, "recipe": self.recipe.to_dict(), **result.to_dict()}
            (folder / REPORT_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def demand_kernels(model: nn.Module) -> None:
    """Raise ConfigError, before texts are read, if the CUDA kernels do not compute hybrid layers of `model`."""
    layers = {module.still: None for module in model.modules() if isinstance(module, HybridOpModule)}
    if reasons := list(dict.fromkeys(line for layer in layers for line in refusals(layer, torch.float32))):
        raise ConfigError(
            f"the CUDA kernels do not compute these layers: {' '.join(reasons)} Change the recipe, or use --device cpu."
        )


def weights_digest(model: nn.Module) -> str:
    """A digest of weights and names."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(name.encode())
        digest.update(parameter.detach().double().sum().numpy().tobytes())
    return digest.hexdigest()


def cross_entropy(logits: Tensor, ids: Tensor) -> float:
    """Mean next-token cross-entropy in nats; logits [B, T, V], ids [B, T]."""
    return float(per_token(logits[:, :-1], ids[:, 1:]).mean())


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
