//! Whether a missed expert is worth a copy. Which expert that is, and which makes room, the scores say.

/// What a copy costs on this machine, as the caller measures it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CopyCost {
    /// Time that one copy takes from the token, in hits: divided by the time that one hit saves. 0: copies are free.
    pub price: f32,
    /// Calls between the one that asks for a copy and the first that it can serve, less one. 0: the next call.
    pub lag: u32,
}

impl CopyCost {
    /// Free and at once.
    pub const NONE: Self = Self { price: 0.0, lag: 0 };
    /// From this price on the policy is at its steadiest. Picked with both traces in view, see docs/replay.md.
    const STEADY_PRICE: f32 = 0.5;
    /// From this lag on the policy is at its steadiest. Picked with both traces in view, see docs/replay.md.
    const STEADY_LAG: f32 = 4.0;

    /// How much what lasts counts for more than what is recent: 0 (copies are free and at once) to 1 (dear or late).
    pub fn steadiness(self) -> f32 {
        (self.price / Self::STEADY_PRICE).max(self.lag as f32 / Self::STEADY_LAG).clamp(0.0, 1.0)
    }
}

/// The rule: a newcomer's score must be higher than that of the expert it would replace by a margin.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AdmissionRule {
    /// In the policy's own scores.
    margin: f32,
}

impl AdmissionRule {
    /// Any newcomer that is better.
    pub const ANY_BETTER: Self = Self { margin: 0.0 };
    /// Nobody: what is resident stays.
    pub const NOBODY: Self = Self { margin: f32::INFINITY };
    /// Margin at a price of one hit, in uses per call.
    ///
    /// Picked with both traces in view: 0.1·√price lies within the wide range of margins that are best for hits minus
    /// priced copies at 8 to 32 slots and prices from 0.1 to 4, see docs/replay.md.
    const MARGIN_OF_ONE_HIT: f32 = 0.1;

    /// The margin that suits what copies cost, for scores in uses per call.
    pub fn priced(cost: CopyCost) -> Self {
        Self { margin: Self::MARGIN_OF_ONE_HIT * cost.price.max(0.0).sqrt() }
    }

    /// Whether an expert with the score `newcomer` may take the place of one with the score `resident`.
    pub fn admits(self, newcomer: f32, resident: f32) -> bool {
        newcomer > resident + self.margin
    }
}
