//! Which batches llama.cpp offloads: the threshold that `moe-hot calibrate` has measured, where the user has not set it.

use super::calibrate::{Calibration, Prompts, model_key, this_machine};
use crate::gguf::ModelFile;
use crate::options::host::{
    GPU_LAYERS, LOAD_MODE, MEASURED_MIN_BATCH, NO_OP_OFFLOAD, OFFLOAD_MIN_BATCH, OFFLOAD_MIN_BATCH_DEFAULT, Settings,
    THREADS, THREADS_BATCH, is_set, whole_number,
};
use std::ffi::OsStr;

/// How the model's file was read when it was measured.
const MEASURED_LOAD_MODE: &str = "auto";
/// Words for all layers. Without any the program puts all there that fit; ours, which places experts, keeps it from moving layers.
const ALL_LAYERS: [&str; 2] = ["auto", "all"];

/// The variables that set the measured threshold; none where the user, or a program before us, has set it, where nothing was
/// measured, where it was measured with other settings, and where it is llama.cpp's own anyway.
pub fn environment(settings: &Settings, model: Option<&ModelFile>) -> Vec<(&'static str, String)> {
    if is_set(OFFLOAD_MIN_BATCH) || settings.has(&NO_OP_OFFLOAD) {
        return Vec::new();
    }
    let Some(model) = model else { return Vec::new() };
    let Ok(Some(stored)) = Calibration::path().and_then(|path| Calibration::load(&path)) else { return Vec::new() };
    if stored.machine != this_machine() {
        return Vec::new();
    }
    chosen(&stored.prompts, settings, model).map_or_else(Vec::new, |min_batch| {
        vec![(OFFLOAD_MIN_BATCH, min_batch.to_string()), (MEASURED_MIN_BATCH, "1".into())]
    })
}

fn chosen(stored: &[Prompts], settings: &Settings, model: &ModelFile) -> Option<u32> {
    let key = model_key(model)?;
    let prompts = stored.iter().find(|prompts| prompts.model == key)?;
    let is_as_measured = has_threads(prompts, settings) && all_on_gpu(settings, model) && is_mapped(settings);
    (is_as_measured && prompts.min_batch > OFFLOAD_MIN_BATCH_DEFAULT).then_some(prompts.min_batch)
}

fn has_threads(prompts: &Prompts, settings: &Settings) -> bool {
    match settings.last(&THREADS_BATCH).or_else(|| settings.last(&THREADS)) {
        Some(threads) => *threads == *prompts.n_threads.to_string(),
        None => !prompts.are_threads_given,
    }
}

/// The threshold is for dense layers too, whose weights more tokens share.
fn all_on_gpu(settings: &Settings, model: &ModelFile) -> bool {
    let n_layers = model.number("block_count").unwrap_or(u64::MAX);
    settings.last(&GPU_LAYERS).is_none_or(|value| {
        let text = value.to_string_lossy();
        ALL_LAYERS.contains(&&*text) || whole_number(&text).is_some_and(|n| n > n_layers)
    })
}

/// Copies from memory that is not a map of the file may be faster.
fn is_mapped(settings: &Settings) -> bool {
    settings.last(&LOAD_MODE).is_none_or(|mode| mode == OsStr::new(MEASURED_LOAD_MODE))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::host::HostOption;
    use std::path::Path;

    fn chosen_with(given: &[(&'static HostOption, &str)], change: impl FnOnce(&mut Prompts)) -> Option<u32> {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/models/moe-small.gguf");
        let model = ModelFile::open(Path::new(path)).unwrap();
        let mut prompts = Prompts {
            model: model_key(&model).unwrap(),
            date: String::new(),
            n_threads: 8,
            are_threads_given: true,
            min_batch: 200,
            prompts: Vec::new(),
        };
        change(&mut prompts);
        let given = given.iter().map(|(option, value)| (*option, value.into()));
        chosen(&[prompts], &Settings::of(given.collect()), &model)
    }

    #[test]
    fn it_is_used_with_the_settings_that_it_was_measured_with() {
        let eight: (&HostOption, &str) = (&THREADS, "8");
        for (given, is_used) in [
            (&[eight][..], true),
            (&[], false),
            (&[(&THREADS, "4")], false),
            (&[(&THREADS, "4"), (&THREADS_BATCH, "8")], true),
            (&[eight, (&THREADS_BATCH, "4")], false),
            (&[eight, (&GPU_LAYERS, "99")], true),
            (&[eight, (&GPU_LAYERS, "all")], true),
            (&[eight, (&GPU_LAYERS, "6")], false), // the output layer stays
            (&[eight, (&GPU_LAYERS, "7")], true),
            (&[eight, (&GPU_LAYERS, "2")], false),
            (&[eight, (&LOAD_MODE, "auto")], true),
            (&[eight, (&LOAD_MODE, "none")], false),
        ] {
            assert_eq!(chosen_with(given, |_| {}), is_used.then_some(200), "{given:?}");
        }
        assert_eq!(chosen_with(&[], |prompts| prompts.are_threads_given = false), Some(200));
    }

    #[test]
    fn another_model_and_llama_cpps_own_threshold_change_nothing() {
        assert_eq!(chosen_with(&[(&THREADS, "8")], |prompts| prompts.min_batch = 32), None);
        assert_eq!(chosen_with(&[(&THREADS, "8")], |prompts| prompts.model = "another".into()), None);
    }
}
