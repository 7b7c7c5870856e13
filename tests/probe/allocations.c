// libmoe-allocations.so, to be preloaded: counts what a program takes from the heap, and which of that ggml's CPU backend
// takes while it computes a graph. Writes three numbers to the file that ALLOCATIONS_FILE names when the program
// ends: {"outside": n, "inside": n, "cpu_graphs": n}. Only glibc has the names used here.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

extern void * __libc_malloc(size_t);
extern void * __libc_calloc(size_t, size_t);
extern void * __libc_realloc(void *, size_t);
extern void * __libc_memalign(size_t, size_t);

static atomic_long outside, inside, cpu_graphs;
static _Thread_local int depth __attribute__((tls_model("initial-exec")));  // of CPU graphs on this thread

static void count(void) {
    atomic_fetch_add_explicit(depth > 0 ? &inside : &outside, 1, memory_order_relaxed);
}

void * malloc(size_t size) {
    count();
    return __libc_malloc(size);
}

void * calloc(size_t n, size_t size) {
    count();
    return __libc_calloc(n, size);
}

void * realloc(void * block, size_t size) {
    count();
    return __libc_realloc(block, size);
}

void * aligned_alloc(size_t alignment, size_t size) {
    count();
    return __libc_memalign(alignment, size);
}

void * memalign(size_t alignment, size_t size) {
    count();
    return __libc_memalign(alignment, size);
}

int posix_memalign(void ** block, size_t alignment, size_t size) {
    count();
    *block = __libc_memalign(alignment, size);
    return *block ? 0 : ENOMEM;
}

typedef void * lookup(void *, const char *);
typedef int    compute(void *, void *);

// The system's own function, by the version that it has on this machine.
static lookup * system_dlsym(void) {
    static const char * const versions[] = {"GLIBC_2.34", "GLIBC_2.17", "GLIBC_2.2.5"};
    static lookup *           found;
    for (size_t i = 0; !found && i < sizeof versions / sizeof *versions; i++) {
        found = (lookup *) dlvsym(RTLD_NEXT, "dlsym", versions[i]);
    }
    return found;
}

// Every computation goes through this function, ggml_backend_graph_compute included.
int ggml_backend_graph_compute_async(void * backend, void * graph) {
    static compute * next;
    static const char * (*name)(void *);
    if (!next) {
        name = (const char * (*)(void *)) system_dlsym()(RTLD_DEFAULT, "ggml_backend_name");
        next = (compute *) system_dlsym()(RTLD_NEXT, "ggml_backend_graph_compute_async");
    }
    const int is_cpu = strcmp(name(backend), "CPU") == 0;
    if (is_cpu) {
        atomic_fetch_add_explicit(&cpu_graphs, 1, memory_order_relaxed);
    }
    depth += is_cpu;
    const int status = next(backend, graph);
    depth -= is_cpu;
    return status;
}

// The plugin looks functions up in ggml itself, and is to find the one above too. What is passed on is passed on with a jump,
// so that the system still sees who asks.
void * dlsym(void * handle, const char * name) {
    if (strcmp(name, "ggml_backend_graph_compute_async") == 0) {
        return (void *) ggml_backend_graph_compute_async;
    }
    return system_dlsym()(handle, name);
}

__attribute__((destructor)) static void write_counts(void) {
    const long counts[] = {outside, inside, cpu_graphs};
    const char * path = getenv("ALLOCATIONS_FILE");
    FILE * file = path ? fopen(path, "w") : NULL;
    if (file) {
        fprintf(file, "{\"outside\": %ld, \"inside\": %ld, \"cpu_graphs\": %ld}\n", counts[0], counts[1], counts[2]);
        fclose(file);
    }
}
