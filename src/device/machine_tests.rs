//! The conformance suite on a device of this machine, with the engine that the plugin would take for it. Not among the usual
//! tests: `scripts/device-check` runs it, on machines without cargo, and says by the environment which device that is.

use super::copy::testing::{Subject, healthy};
use super::copy::{CopyEngine, PortableEngine};
use super::cuda;
use crate::ggml::Device;
use crate::ggml::test_devices::load_all;
use std::env;
use std::path::Path;
use std::time::Duration;

/// The folder with ggml's backends.
const BACKENDS: &str = "MOE_HOT_TEST_BACKENDS";
/// The device, as `--list-devices` names it.
const DEVICE: &str = "MOE_HOT_TEST_DEVICE";
/// Where an RPC server listens; only for its devices.
const RPC: &str = "MOE_HOT_TEST_RPC";

#[test]
#[ignore = "needs a device that the environment names; scripts/device-check runs it"]
fn copy_engines_conform_on_the_devices_of_this_machine() {
    let [folder, name] = [BACKENDS, DEVICE].map(|variable| env::var(variable).unwrap());
    load_all(Path::new(&folder), env::var(RPC).ok().as_deref());
    let device = Device::named(&name).unwrap_or_else(|| panic!("there is no device {name}"));
    for pinned in [true, false] {
        let make = |bytes: usize, _: Duration| -> Box<dyn CopyEngine> {
            match cuda::engine_for(device, bytes, pinned) {
                Some(engine) => engine.unwrap(),
                None => Box::new(PortableEngine::new(device, bytes, pinned).unwrap()),
            }
        };
        healthy(&Subject { make: &make, device });
        let engine = if cuda::engine_for(device, 1, pinned).is_some() { "CUDA" } else { "portable" };
        println!("{name}, {engine} engine, page-locked staging wanted: {pinned}: conforms");
    }
}
