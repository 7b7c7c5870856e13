//! What a policy costs the token: 48 layers of 256 experts, top-8, 64 slots. Each item is one layer and token.
//!
//! `cargo bench --bench policy`. Bar: 1.5 µs per layer and token, the counting of requests included. `cold` runs after
//! 64 MiB of other memory were read, as a model's weights do between two tokens.
#![allow(missing_docs)]

use divan::counter::ItemsCount;
use divan::{Bencher, black_box};
use ggml_moe_hot::cache::policy::{AdmissionRule, Blend, CopyCost, Policy, ReplacementPolicy, Weights};
use ggml_moe_hot::profile::LayerCounts;
use ggml_moe_hot::replay::policies::{Lfu, Lru};
use ggml_moe_hot::units::Expert;

const N_LAYERS: usize = 48;
const N_EXPERT: u16 = 256;
const N_USED: usize = 8;
const N_SLOTS: u16 = 64;
const N_TOKENS: usize = 512;
/// Tokens seen before the clock starts.
const WARM_UP: usize = 300;
/// The same tokens in every run.
const SEED: u64 = 1;
const OTHER_BYTES: usize = 64 << 20;

fn main() {
    divan::main();
}

/// Distinct experts, some of which come up more often than others, from a pseudo-random sequence with a fixed seed.
fn tokens() -> Vec<[Expert; N_USED]> {
    let mut random = fastrand::Rng::with_seed(SEED);
    let mut next = || {
        let uniform = random.f32();
        Expert((uniform * uniform * f32::from(N_EXPERT)) as u16)
    };
    let token = |_| {
        let mut used = Vec::new();
        while used.len() < N_USED {
            let expert = next();
            if !used.contains(&expert) {
                used.push(expert);
            }
        }
        std::array::from_fn(|index| used[index])
    };
    (0..N_TOKENS).map(token).collect()
}

/// All layers' policies and counters, and the experts that are resident: for timing the same in every layer.
struct Model<P> {
    layers: Vec<(ReplacementPolicy<P>, LayerCounts)>,
    tokens: Vec<[Expert; N_USED]>,
    token: usize,
}

impl<P: Policy> Model<P> {
    fn new(policy: impl Fn() -> P) -> Self {
        let cost = CopyCost { price: 0.25, lag: 4 };
        let layer =
            |_| (ReplacementPolicy::new(policy(), AdmissionRule::priced(cost)), LayerCounts::new(0, N_EXPERT.into()));
        let mut model = Self { layers: (0..N_LAYERS).map(layer).collect(), tokens: tokens(), token: 0 };
        (0..WARM_UP).for_each(|_| model.step());
        model
    }

    /// One token: count, observe, ask for one copy.
    fn step(&mut self) {
        self.token += 1;
        for (layer, (policy, counts)) in self.layers.iter_mut().enumerate() {
            let used = &self.tokens[(self.token + layer * 7) % N_TOKENS];
            let is_resident = |expert: &Expert| expert.0.is_multiple_of(N_EXPERT / N_SLOTS);
            counts.add(1, used.iter().map(|expert| (i32::from(expert.0), is_resident(expert))));
            policy.observe(used);
            let missed = used.iter().copied().filter(|expert| !is_resident(expert));
            let held = (0..N_SLOTS).map(|slot| Expert(slot * (N_EXPERT / N_SLOTS)));
            black_box(policy.admission(missed, held, false));
        }
    }

    fn bench(mut self, bencher: Bencher<'_, '_>) {
        bencher.counter(ItemsCount::new(N_LAYERS)).bench_local(|| self.step());
    }

    fn bench_cold(mut self, bencher: Bencher<'_, '_>) {
        let other = vec![1u8; OTHER_BYTES];
        let touch = || {
            black_box(black_box(&other).iter().step_by(64).fold(0u8, |all, byte| all ^ byte));
        };
        bencher.counter(ItemsCount::new(N_LAYERS)).with_inputs(touch).bench_local_values(|()| self.step());
    }
}

fn blend() -> Blend {
    Blend::new(N_EXPERT, Weights::STEADY)
}

#[divan::bench]
fn default(bencher: Bencher<'_, '_>) {
    Model::new(blend).bench(bencher);
}

#[divan::bench(sample_count = 50, sample_size = 1)]
fn default_cold(bencher: Bencher<'_, '_>) {
    Model::new(blend).bench_cold(bencher);
}

#[divan::bench]
fn lfu(bencher: Bencher<'_, '_>) {
    Model::new(|| Lfu::new(N_EXPERT)).bench(bencher);
}

#[divan::bench(sample_count = 50, sample_size = 1)]
fn lfu_cold(bencher: Bencher<'_, '_>) {
    Model::new(|| Lfu::new(N_EXPERT)).bench_cold(bencher);
}

#[divan::bench]
fn lru(bencher: Bencher<'_, '_>) {
    Model::new(|| Lru::new(N_EXPERT)).bench(bencher);
}
