// A plugin of qemu-user: prints how many instructions a program executed. What it uses of version 1 of QEMU's interface for plugins (QEMU 4.2 to
// 8.2) is declared here, as no package has the header.
#include <stdint.h>
#include <stdio.h>

struct block; // of a program's instructions

void qemu_plugin_register_vcpu_tb_trans_cb(uint64_t id, void (*translated)(uint64_t id, struct block*));
void qemu_plugin_register_vcpu_tb_exec_inline(struct block*, int operation, void* number, uint64_t more);
void qemu_plugin_register_atexit_cb(uint64_t id, void (*ended)(uint64_t id, void*), void*);
uint64_t qemu_plugin_tb_n_insns(struct block const*);

int qemu_plugin_version = 1;

static uint64_t executed;

static void translated(uint64_t id, struct block* block)
{
    (void)id;
    qemu_plugin_register_vcpu_tb_exec_inline(block, 0, &executed, qemu_plugin_tb_n_insns(block)); // 0: add
}

static void ended(uint64_t id, void* nothing)
{
    (void)id, (void)nothing;
    fprintf(stderr, "instructions: %llu\n", (unsigned long long)executed);
}

int qemu_plugin_install(uint64_t id, void const* machine, int count, char** arguments)
{
    (void)machine, (void)count, (void)arguments;
    qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
    qemu_plugin_register_atexit_cb(id, ended, NULL);
    return 0;
}
