"""Wrong offers: another block, another generation or another first token than the true ones."""

from typing import TYPE_CHECKING

import msgspec

from splitserve.kvconnector.blocks.pool import GENERATION_MASK
from splitserve.protocol.messages.handover import Offer, OfferedBlock
from splitserve.protocol.request import Party
from splitserve.simulation.model import VOCAB

if TYPE_CHECKING:
    from splitserve.simulation.simulator import Simulator

INVENTED_TOKENS = 5  # above the vocabulary


class Liar:
    """The source of wrong offers: it changes true ones on their way, only so that the protocol can detect it.

    A wrong block is one that has another generation than the offered one, for good. A wrong first token contradicts
    the one that prefill itself sends to the router.
    """

    def __init__(self, sim: "Simulator") -> None:
        self._sim = sim
        self.deceived: set[str] = set()  # ids of requests that were offered a wrong first token

    def twist(self, sender: Party, offer: Offer) -> Offer:
        """Return the offer, or a wrong one in its place."""
        chosen = self._sim.random
        if chosen.random() >= self._sim.faults.lies:
            return offer
        if offer.first_tokens and chosen.random() < 0.3:
            self.deceived.add(offer.key.request_id)
            true_token, *others = offer.first_tokens
            token = (true_token + chosen.randrange(1, VOCAB + INVENTED_TOKENS)) % (VOCAB + INVENTED_TOKENS)
            return msgspec.structs.replace(offer, first_tokens=[token, *others])
        named = [span for span in offer.spans if span.blocks]
        if not named:
            return offer
        span = chosen.choice(named) if len(named) > 1 else named[0]
        blocks = list(span.blocks)
        number = chosen.choice([len(blocks) - 1, chosen.randrange(len(blocks))])
        blocks[number] = self._other_block(sender, span.group, blocks[number])
        spans = list(offer.spans)
        spans[span.group] = msgspec.structs.replace(span, blocks=blocks)
        return msgspec.structs.replace(offer, spans=spans)

    def _other_block(self, sender: Party, group: int, true_block: OfferedBlock) -> OfferedBlock:
        """Return a block that doesn't exist, has other content, or has lost its content."""
        chosen, source = self._sim.random, self._sim.workers[str(sender)]
        blocks, slots = range(source.num_blocks), range(source.num_blocks, source.num_readable)
        # Generations of blocks and slots are far apart. Within a kind they grow: a larger one never becomes it.
        others, other_slots = (
            [each for each in ids if source.generation(each, group) > true_block.generation]
            if true_block.block_id in ids
            else list(ids)
            for ids in (blocks, slots)
        )
        beyond = source.num_readable + chosen.randrange(3)
        wrong_ids = [chosen.choice(each) for each in (others, other_slots, other_slots, [beyond]) if each]
        lies = [msgspec.structs.replace(true_block, block_id=block_id) for block_id in wrong_ids]
        past = (true_block.generation - 1) & GENERATION_MASK
        lies.append(msgspec.structs.replace(true_block, generation=past))
        return chosen.choice([lie for lie in lies if lie.block_id != true_block.block_id or lie.generation == past])
