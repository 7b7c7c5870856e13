//! What the programs' logs say: moe-hot's own lines about its cache, and llama.cpp's about the memory it took.
//!
//! Pure: takes a log apart, reads no file.

use serde::{Deserialize, Serialize};

/// What our lines begin with.
const OURS: &str = "moe-hot: ";
/// Words of the lines that say that a cache is off, was given up, or serves only some batches.
const OFF: [&str; 10] = [
    "inert: ",
    "no hot cache",
    "hot cache off",
    "cache of this model off",
    "not used for",
    "any more",
    "given up",
    "held back",
    "not loaded",
    "had no room",
];
/// Words of a line that says only that a context ended before its cache was filled, as llama-bench's first one does.
const NOT_YET: &str = "it is filled after some tokens";
/// Words before llama.cpp's name of a device that it uses.
const USES: &str = "using device ";

/// What one process said about its cache.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CacheSaid {
    /// Device memory that it took in MiB, rounded up, scratch included.
    pub mib: u64,
    /// Slots per layer.
    pub slots: u32,
    /// Layers with slots.
    pub layers: u32,
    /// Requests whose expert was on the device.
    pub hits: u64,
    /// All others.
    pub misses: u64,
    /// MiB copied to the device, the first fill included.
    pub copied_mib: f64,
    /// Why its figures say nothing about a cache: a line that says that it was off, at least for a while.
    pub off: Option<String>,
}

impl CacheSaid {
    /// Reads a log; a run without a line about a cache had none.
    pub fn read(log: &str) -> Self {
        let mut said = Self::default();
        let lines = log.lines().filter_map(|line| line.split_once(OURS).map(|(_, line)| line));
        for line in lines {
            if let Some(start) = start(line) {
                // llama-bench's first context needs one layer only; later ones need all.
                if (start.layers, start.mib) >= (said.layers, said.mib) {
                    (said.mib, said.slots, said.layers) = (start.mib, start.slots, start.layers);
                }
            } else if let Some((hits, misses, copied)) = end(line) {
                said.hits += hits;
                said.misses += misses;
                said.copied_mib += copied;
            } else if OFF.iter().any(|word| line.contains(word)) && !line.contains(NOT_YET) {
                said.off.get_or_insert_with(|| line.to_owned());
            }
        }
        if said.off.is_none() && said.layers == 0 {
            said.off = Some("no line says that a cache was on".into());
        }
        said
    }

    /// Share of requests whose expert was on the device; `None` where none was counted.
    pub fn hit_rate(&self) -> Option<f64> {
        let all = self.hits + self.misses;
        (all > 0).then(|| self.hits as f64 / all as f64)
    }
}

/// `hot cache on RPC0: 6 MiB, 16 slots per layer (32 experts) in 6 layers; …`.
fn start(line: &str) -> Option<CacheSaid> {
    let (_, rest) = line.strip_prefix("hot cache on ")?.split_once(": ")?;
    let (mib, rest) = rest.split_once(" MiB, ")?;
    let (slots, rest) = rest.split_once(" slots per layer (")?;
    let (layers, _) = rest.split_once(" experts) in ")?.1.split_once(" layers")?;
    Some(CacheSaid {
        mib: mib.parse().ok()?,
        slots: slots.parse().ok()?,
        layers: layers.parse().ok()?,
        ..Default::default()
    })
}

/// `hot cache: 807 hits, 765 misses, hit rate 51.3 %; 7.1 MiB copied, 27 graphs made`.
fn end(line: &str) -> Option<(u64, u64, f64)> {
    let (hits, rest) = line.strip_prefix("hot cache: ")?.split_once(" hits, ")?;
    let (misses, rest) = rest.split_once(" misses, ")?;
    let (copied, _) = rest.split_once(" %; ")?.1.split_once(" MiB copied")?;
    Some((hits.parse().ok()?, misses.parse().ok()?, copied.parse().ok()?))
}

/// What llama.cpp says of a device when it loads a model: its description and its id, which is its place on the bus where it has
/// one. `using device CUDA0 (NVIDIA …) (0000:01:00.0) - 24105 MiB free`.
pub fn device(log: &str, name: &str) -> Option<String> {
    log.lines().find_map(|line| {
        let (_, rest) = line.split_once(USES)?;
        let (said, _) = rest.strip_prefix(name)?.strip_prefix(' ')?.rsplit_once(" - ")?;
        Some(said.to_owned())
    })
}

/// Device memory that llama.cpp took, MiB.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Buffers {
    /// Weights.
    pub model_mib: f64,
    /// Keys, values and states of the largest context, and its scratch memory.
    pub context_mib: f64,
}

impl Buffers {
    /// Reads a verbose log: of the model that was loaded last, and the largest of its contexts.
    pub fn read(log: &str, device: &str) -> Self {
        let (mut found, mut state_mib, mut compute_mib) = (Self::default(), 0.0, 0.0_f64);
        for line in log.lines() {
            if line.contains("llama_model_loader: loaded meta data") {
                (found, state_mib, compute_mib) = (Self::default(), 0.0, 0.0);
            } else if line.contains("llama_context: constructing") {
                (state_mib, compute_mib) = (0.0, 0.0);
            } else if let Some((kind, mib)) = buffer(line, device) {
                match kind {
                    "model" => found.model_mib += mib,
                    // Reserved anew it takes the place of what was there.
                    "compute" => compute_mib = compute_mib.max(mib),
                    _ => state_mib += mib,
                }
                found.context_mib = found.context_mib.max(state_mib + compute_mib);
            }
        }
        found
    }
}

/// `llama_kv_cache: RPC0[127.0.0.1:50152] KV buffer size =     6.00 MiB`: which kind, and how many MiB.
fn buffer<'a>(line: &'a str, device: &str) -> Option<(&'a str, f64)> {
    let (before, size) = line.split_once(" buffer size = ")?;
    let (place, kind) = before.trim_end().rsplit_once(' ')?;
    let place = place.trim_end().rsplit(' ').next()?;
    let is_here = place.strip_prefix(device).is_some_and(|rest| rest.is_empty() || rest.starts_with('['));
    let mib = size.trim().strip_suffix(" MiB")?.trim().parse().ok()?;
    is_here.then_some((kind, mib))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "load_backend: loaded\n\
        moe-hot: hot cache on RPC0: 2 MiB, 32 slots per layer (32 experts) in 1 layers; nothing is learnt yet; profile: x\n\
        0.04.646.432 W moe-hot: hot cache on RPC0: 6 MiB, 16 slots per layer (32 experts) in 6 layers; the profile expects 57.5 % hits\n\
        moe-hot: hot cache: 0 hits, 12 misses, hit rate 0.0 %; 0.0 MiB copied, 0 graphs made\n\
        moe-hot: hot cache: 36 hits, 12 misses, hit rate 75.0 %; 7.1 MiB copied, 27 graphs made\n";

    #[test]
    fn what_a_cache_did_is_added_up_over_its_contexts() {
        let said = CacheSaid::read(LOG);
        assert_eq!((said.mib, said.slots, said.layers), (6, 16, 6));
        assert_eq!((said.hits, said.misses, said.copied_mib, said.off.clone()), (36, 24, 7.1, None));
        assert_eq!(said.hit_rate(), Some(0.6));
        assert_eq!(CacheSaid::default().hit_rate(), None);
    }

    #[test]
    fn a_cache_that_was_off_or_given_up_says_so() {
        for line in [
            "moe-hot: inert: DEVICE shares the host's memory: nothing to win",
            "moe-hot: no hot cache: 1 MiB hold 0 slots per layer",
            "0.1 W moe-hot: hot cache of this model off on RPC0: a layer takes 1041 µs with it and 345 µs without; experts run on the CPU",
            "moe-hot: hot cache not used for batches of about 1 tokens any more: a layer takes 3 µs with it and 2 µs without",
            "moe-hot: hot cache off on CUDA0: a copy to it failed; experts run on the CPU",
        ] {
            let said = CacheSaid::read(&format!("{LOG}{line}\n"));
            assert!(said.off.is_some_and(|off| line.ends_with(&off)), "{line}");
        }
        assert_eq!(CacheSaid::read("").off.unwrap(), "no line says that a cache was on");
    }

    #[test]
    fn a_context_that_ends_before_its_cache_is_filled_is_no_cache_that_is_off() {
        let said = CacheSaid::read(&format!("moe-hot: no hot cache: {NOT_YET}\n{LOG}"));
        assert_eq!((said.layers, said.off), (6, None));
        let said = CacheSaid::read(&format!("moe-hot: no hot cache: {NOT_YET}\n"));
        assert_eq!(said.off.unwrap(), "no line says that a cache was on");
    }

    #[test]
    fn a_device_is_told_by_its_description_and_its_place() {
        let log =
            "0.0 I llama_prepare_model_devices: using device CUDA0 (NVIDIA (x)) (0000:01:00.0) - 24105 MiB free\n";
        assert_eq!(device(log, "CUDA0").unwrap(), "(NVIDIA (x)) (0000:01:00.0)");
        assert_eq!((device(log, "CUDA"), device("", "CUDA0")), (None, None));
    }

    #[test]
    fn memory_is_that_of_the_device_and_of_the_largest_context() {
        let log = "llama_model_loader: loaded meta data with 1\n\
            load_tensors:       MoEHot model buffer size =    12.07 MiB\n\
            load_tensors: RPC0[127.0.0.1:50152] model buffer size =     2.50 MiB\n\
            llama_context: constructing llama_context\n\
            llama_kv_cache: RPC0[127.0.0.1:50152] KV buffer size =     0.75 MiB\n\
            sched_reserve: RPC0[127.0.0.1:50152] compute buffer size =     5.51 MiB\n\
            sched_reserve:        CPU compute buffer size =     6.51 MiB\n\
            ~llama_context: RPC0[127.0.0.1:50152] compute buffer size is   5.5 MiB, matches expectation of   5.5 MiB\n\
            llama_context: constructing llama_context\n\
            llama_kv_cache: RPC0[127.0.0.1:50152] KV buffer size =     1.00 MiB\n\
            llama_kv_cache: RPC0[127.0.0.1:50152] KV buffer size =     0.50 MiB\n\
            sched_reserve: RPC0[127.0.0.1:50152] compute buffer size =     1.00 MiB\n\
            sched_reserve: RPC0[127.0.0.1:50152] compute buffer size =     1.25 MiB\n";
        let found = Buffers::read(log, "RPC0");
        assert_eq!(found, Buffers { model_mib: 2.5, context_mib: 6.26 });
        let twice = Buffers::read(&format!("{log}{log}"), "RPC0");
        assert_eq!(twice, found, "of the model that was loaded last");
        assert_eq!(Buffers::read(log, "RPC1"), Buffers::default());
        assert_eq!(Buffers::read(&log.replace("RPC0[127.0.0.1:50152]", "Vulkan0"), "Vulkan0").model_mib, 2.5);
    }
}
