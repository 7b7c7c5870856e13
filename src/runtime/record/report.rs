//! What users are told at the end: what was recorded, and what the cache has done.

use crate::ggml::{Level, graphs_built, log};
use crate::options::Config;
use crate::profile::ratio;
use crate::runtime::model::{Model, Totals};
use std::path::PathBuf;
use std::sync::Arc;

/// What llama.cpp has done with experts, where none of their layers has reached us.
#[derive(Clone, Copy, Debug)]
pub enum Experts {
    /// None are placed with us.
    Elsewhere,
    /// It asked about each batch, and all of them were large.
    InLargeBatches,
    /// It has computed batches that it did not ask about.
    Unasked,
}

/// One line on what became of the recording. `experts`: for when no layer has reached us. `file_of`: the file that a model's
/// recording went to.
pub fn report(
    config: &Config,
    models: &[Arc<Model>],
    experts: Experts,
    file_of: impl Fn(&Arc<Model>) -> Option<PathBuf>,
) {
    let largest = config.plain_min_batch.saturating_sub(1);
    if models.is_empty() {
        let reason = match experts {
            Experts::Elsewhere => "no experts were placed with moe-hot (a dense model, or experts elsewhere)".into(),
            Experts::InLargeBatches => {
                format!("only batches of more than {largest} tokens were computed, which are llama.cpp's")
            }
            Experts::Unasked => format!(
                "no expert layer has reached moe-hot: only batches of more than {largest} tokens were computed, or llama.cpp \
                 kept the experts to itself (its own cache, --moe-cache-mib)"
            ),
        };
        log(Level::Warn, &format!("nothing was recorded: {reason}"));
    }
    for model in models {
        report_cache(config, model);
        let Some(path) = file_of(model) else { continue };
        let Totals { layers, calls, requests, .. } = model.totals();
        let path = path.display();
        log(
            Level::Warn,
            &format!("recorded {requests} (token, expert) requests in {calls} calls of {layers} layers: {path}"),
        );
    }
}

/// One line on what the cache has done.
fn report_cache(config: &Config, model: &Model) {
    let Totals { requests, hits, copied_bytes, .. } = model.totals();
    if !config.caches() || requests == 0 {
        return;
    }
    let misses = requests.saturating_sub(hits);
    let (rate, copied) = (100.0 * ratio(hits, requests), copied_bytes as f64 / f64::from(1 << 20));
    let graphs = graphs_built();
    model.name().log(
        Level::Warn,
        &format!(
            "hot cache: {hits} hits, {misses} misses, hit rate {rate:.1} %; {copied:.1} MiB copied, {graphs} graphs made"
        ),
    );
}
