//! The conformance suite, on the engine for any device: on ggml's CPU device, and on FakeDevice.

use super::testing::{Subject, failing, hanging, hanging_unseen, healthy, in_a_process_of_its_own, slow};
use super::{CopyEngine, PortableEngine, staging_blocks};
use crate::ggml::Device;
use crate::ggml::test_devices::FakeDevice;
use crate::ggml::testing::load_cpu;
use std::time::Duration;

fn on(device: Device, pinned: bool, check: impl FnOnce(&Subject<'_>)) {
    let make = |bytes: usize, timeout: Duration| -> Box<dyn CopyEngine> {
        Box::new(PortableEngine::new(device, bytes, pinned).unwrap().with_timeout(timeout))
    };
    check(&Subject { make: &make, device });
}

fn on_fake_device(check: impl FnOnce(&Subject<'_>, &FakeDevice)) {
    load_cpu();
    let fake = FakeDevice::load();
    on(fake.device, false, |subject| check(subject, &fake));
}

#[test]
fn there_are_two_staging_blocks_or_as_many_as_fit() {
    assert_eq!(staging_blocks(1 << 20), (8, 1 << 20));
    assert_eq!(staging_blocks(20 << 20), (3, 20 << 20));
    assert_eq!(staging_blocks(200 << 20), (2, 200 << 20));
    assert_eq!(staging_blocks(0), (8, 1));
}

#[test]
fn portable_engines_conform_on_the_cpu() {
    load_cpu();
    on(Device::cpu().unwrap(), false, healthy);
}

#[test]
fn portable_engines_conform_where_host_memory_cannot_be_page_locked() {
    load_cpu();
    on(Device::cpu().unwrap(), true, healthy);
}

#[test]
fn portable_engines_conform_on_a_device() {
    in_a_process_of_its_own(|| on_fake_device(|subject, _| healthy(subject)));
}

#[test]
fn portable_engines_conform_with_the_devices_own_host_memory() {
    in_a_process_of_its_own(|| {
        load_cpu();
        let fake = FakeDevice::load();
        fake.set("host_buffer", 1);
        on(fake.device, true, healthy);
    });
}

#[test]
fn portable_engines_conform_on_a_slow_device() {
    in_a_process_of_its_own(|| {
        on_fake_device(|subject, fake| slow(subject, &|bandwidth| fake.set("bandwidth_mbs", bandwidth)));
    });
}

#[test]
fn portable_engines_conform_where_copies_fail() {
    in_a_process_of_its_own(|| {
        on_fake_device(|subject, fake| failing(subject, &|nth| fake.set("fault_copy_once", nth)));
    });
}

#[test]
fn portable_engines_conform_where_a_copy_never_ends() {
    in_a_process_of_its_own(|| {
        on_fake_device(|subject, fake| hanging(subject, &|nth| fake.set("fault_hang", nth)));
    });
}

#[test]
fn portable_engines_can_be_dropped_while_a_copy_hangs() {
    in_a_process_of_its_own(|| {
        on_fake_device(|subject, fake| hanging_unseen(subject, &|nth| fake.set("fault_hang", nth)));
    });
}

#[test]
fn there_is_no_engine_where_the_device_makes_no_instance() {
    in_a_process_of_its_own(|| {
        load_cpu();
        let fake = FakeDevice::load();
        fake.set("fault_init", 1);
        assert!(PortableEngine::new(fake.device, 1, false).is_err());
    });
}
