use super::*;
use std::fmt::Write;

fn config(variables: &[(&str, &str)]) -> Config {
    Config::from_lookup(|name| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into()))
}

#[test]
fn nothing_set_means_nothing_taken() {
    let config = config(&[]);
    assert!(!config.takes_experts());
    assert_eq!(config.offload_min_batch, 32);
}

#[test]
fn an_empty_path_is_no_path_and_a_relative_one_becomes_absolute() {
    assert_eq!(config(&[(PERF_OUT.variable, "")]).perf_out, None);
    assert!(config(&[(PERF_OUT.variable, "experts.json")]).perf_out.unwrap().is_absolute());
}

#[test]
fn auto_is_no_file_and_a_file_may_be_called_that() {
    let profile = |value: &str| config(&[(HOT_CACHE.variable, value)]).hot_cache.unwrap();
    assert_eq!(profile("auto"), CacheProfile::Auto);
    assert!(profile("./auto").file().unwrap().is_absolute());
    assert_eq!(config(&[(HOT_CACHE.variable, "auto")]).shown(&HOT_CACHE), "auto");
}

#[test]
fn a_cache_takes_experts_unless_it_is_off() {
    let (file, size) = ((HOT_CACHE.variable, "experts.json"), HOT_CACHE_MAX_MIB.variable);
    assert!(config(&[file]).takes_experts());
    assert!(config(&[file, (size, "1")]).takes_experts());
    assert!(!config(&[file, (size, "0")]).takes_experts());
    assert!(!config(&[(HOT_CACHE.variable, "")]).takes_experts());
    assert!(!config(&[(size, "100")]).takes_experts());
}

#[test]
fn every_option_is_read_into_the_configuration() {
    let values = ["/out", "/profile", "700", "0", "CUDA0", "0.25", "copy", "/trace"];
    let variables: Vec<_> = OPTIONS.iter().map(|option| option.variable).zip(values).collect();
    let all = config(&variables);
    for (option, value) in OPTIONS.iter().zip(values) {
        assert_eq!(all.shown(option), value, "{}", option.flag);
    }
    assert_eq!((all.perf_out, all.hot_cache), (Some("/out".into()), Some(CacheProfile::File("/profile".into()))));
    assert_eq!((all.max_mib, all.auto_reserve_mib), (Budget::Mib(700), 0));
    assert_eq!((all.device.as_deref(), all.update_rate), (Some("CUDA0"), Some(UpdateRate(0.25))));
    assert_eq!((all.miss, all.trace_out, all.invalid), (MissRule::Copy, Some("/trace".into()), Vec::new()));
    let none = config(&[]);
    assert_eq!((none.max_mib, none.auto_reserve_mib, none.device), (Budget::Automatic, 1024, None));
}

#[test]
fn settings_for_tests_do_nothing_unless_set() {
    let none = config(&[]);
    let unset = (
        none.test_slots,
        none.test_free_copies,
        none.test_no_guard,
        none.test_wait,
        none.test_host_splits,
        none.test_host_rows,
        none.test_timings,
        none.claim_unplaced,
    );
    assert_eq!(unset, (None, false, false, false, false, false, None, false));
    let some = config(&[
        (TEST_SLOTS.variable, "4"),
        (TEST_FREE_COPIES.variable, "1"),
        (TEST_NO_GUARD.variable, "1"),
        (TEST_WAIT.variable, "1"),
        (TEST_HOST_SPLITS.variable, "1"),
        (TEST_HOST_ROWS.variable, "1"),
        (TEST_TIMINGS.variable, "/t"),
        (TEST_CLAIM_UNPLACED.variable, "1"),
    ]);
    let set = (
        some.test_slots,
        some.test_free_copies,
        some.test_no_guard,
        some.test_wait,
        some.test_host_splits,
        some.test_host_rows,
        some.test_timings,
        some.claim_unplaced,
    );
    assert_eq!(set, (Some(4), true, true, true, true, true, Some("/t".into()), true));
}

#[test]
fn what_cannot_be_read_becomes_the_default_and_is_told() {
    let config = config(&[
        (HOT_CACHE_MAX_MIB.variable, "much"),
        (HOT_CACHE_AUTO_RESERVE_MIB.variable, "-5"),
        (TEST_SLOTS.variable, "x"),
    ]);
    assert_eq!((config.max_mib, config.auto_reserve_mib, config.test_slots), (Budget::Automatic, 1024, None));
    assert_eq!(config.invalid.len(), 3);
    let told = config.invalid[0].to_string();
    assert!(told.starts_with("LLAMA_ARG_MOE_HOT_CACHE_MAX_MIB is \"much\": expected a whole number of MiB"), "{told}");
}

#[test]
fn either_name_keeps_us_away_from_page_locked_memory() {
    assert!(!config(&[]).no_host);
    assert!(config(&[(LAUNCHER_NO_HOST, "1")]).no_host && config(&[(NO_HOST.variable, "true")]).no_host);
    assert!(!config(&[(NO_HOST.variable, "0")]).no_host);
}

#[test]
fn the_names_of_an_option_belong_together() {
    for option in OPTIONS {
        let words = option.ini_key();
        assert_eq!(option.flag, format!("--{words}"));
        assert_eq!(option.variable, format!("LLAMA_ARG_{}", words.replace('-', "_").to_uppercase()));
        assert!(option.check(OsStr::new("auto")).is_ok() || option.check(OsStr::new("1")).is_ok(), "{words}");
    }
}

/// The table as patched programs have it.
fn table_for_c() -> String {
    let mut table =
        "// The table of options for patched programs, from src/options/table.rs; a test compares them.\n".to_owned();
    for OptionSpec { flag, variable, value_name, help, default, .. } in OPTIONS {
        writeln!(table, "MOE_HOT_OPTION({flag:?}, {variable:?}, {value_name:?},\n    \"{help} (default: {default})\")")
            .unwrap();
    }
    table
}

#[test]
fn patched_programs_have_the_table_of_options() {
    let wanted = table_for_c();
    assert_eq!(include_str!("../../ggml-hooks/glue/options.inc"), wanted, "put this there:\n{wanted}");
}

/// The README's table, from the table of options.
fn readme_table() -> String {
    let mut table = "| flag | environment | what it does | default |\n|---|---|---|---|\n".to_owned();
    for option in OPTIONS {
        let OptionSpec { flag, variable, value_name, help, default, .. } = option;
        writeln!(table, "| `{flag} {value_name}` | `{variable}` | {help} | {default} |").unwrap();
    }
    table
}

#[test]
fn the_readme_has_the_table_of_options() {
    let readme = include_str!("../../README.md");
    let (begin, end) = ("<!-- options -->\n", "<!-- end of options -->");
    let table = readme.split_once(begin).and_then(|(_, rest)| rest.split_once(end)).map(|(table, _)| table.trim());
    let wanted = readme_table();
    assert_eq!(table, Some(wanted.trim()), "put this between the README's markers:\n{wanted}");
}
