// SPDX-License-Identifier: Apache-2.0
// JOIN: one contested slot; binding decided by the manager (2 seats on machines 0,1); joiners: p0,p1 on machine 2, p2 on machine 3. 2 multi-writer hint boxes.
#include "mc.h"
#include <map>
#include <set>
enum{NO=0};
struct Bd{u8 tag,inc,m,n;}; struct Bx{u8 m,n,prev;};
struct J{u8 pc,i,gen,tag,inc,prev,dead;}; struct M{u8 pc,i,e,wm,wn;Bd a;};
struct S{u8 seat[2],fen[2];Bd bd[2];Bx bx[2];u8 idm,idinc,idleft;J j[3];M m[2];u8 lk,off,claims,fences,pcr,mcr,reb,leaves,retries,bad;};
std::set<std::string> d; static bool D(const char*s){return d.count(s);} int NB=2,NJ=3;
static int mach(int j){return j<2?2:3;} static int nonce(const J&x,int j){return 1+j*8+x.gen;}
static int owners(const S&s){int n=0;for(int j=0;j<NJ;j++) if(s.j[j].pc==5||s.j[j].pc==6||s.j[j].pc==7)n++;return n;}
enum{LLOCK,LPREV,LBOX,LSEE,LCHK,LACC,LID,LFEN,LLEAVE,LRETRY,LPC,LMC,LREB,LTO,LRS,LCL,LCOL,LAD,LRB,LPROOF,LBIND,LSUS,LSTEP,LNV};
const char*LN[]={"local lock","read binding","publish JOINBOX","sees binding","check seat","ACCEPT slot","publish ID","fenced: quiesce, start again","leave (ID=LEFT)","retry","process crash","MACHINE CRASH","reboot","start takeover","read seat","CLAIM","collect","ADOPT","read joinbox","transfer: proof","BIND","fence","step down","naive claim"};
template<class E> void gen(const S&s,E emit){
 for(int j=0;j<NJ;j++){ const J&x=s.j[j]; if(x.dead) continue; int m=mach(j); auto L=[&](int l){return l*4+j;}; S n=s; J&y=n.j[j];
  if(D("naive_claim")){ switch(x.pc){ case 0: if(!s.idm||s.idleft){y.pc=1;emit(n,L(LPREV));} break; case 1: n.idm=m;n.idinc=j+1;n.idleft=0;y.pc=2;emit(n,L(LID));break; case 2: if(s.idm==m&&s.idinc==j+1){y.pc=6;} else y.pc=0; emit(n,L(LNV)); break; } continue; }
  switch(x.pc){
  case 0: if(!(s.lk>>m&1)||D("no_local_lock")){ n.lk|=1<<m; y.pc=1; emit(n,L(LLOCK)); } break;
  case 1: for(int k=0;k<2;k++){ S q=s; q.j[j].prev=D("prev_is_number")?s.bd[k].inc:s.bd[k].n; q.j[j].pc=2; emit(q,L(LPREV)); if(s.bd[0].inc==s.bd[1].inc&&s.bd[0].n==s.bd[1].n)break; } break;
  case 2: for(int b=0;b<NB;b++){ S q=s; q.bx[b]={(u8)m,(u8)nonce(x,j),x.prev}; q.j[j].pc=3; q.j[j].prev=0; emit(q,L(LBOX)); } break;
  case 3: for(int k=0;k<2;k++) if(s.bd[k].m==m&&(s.bd[k].n==nonce(x,j)||D("bind_to_machine_only"))&&s.bd[k].tag){ S q=s; q.j[j].tag=s.bd[k].tag; q.j[j].inc=s.bd[k].inc; q.j[j].i=0; q.j[j].pc=D("accept_without_check")?5:4; emit(q,L(LSEE)); }
     if(s.retries){ n.retries--; y.pc=1; emit(n,L(LRETRY)); } break;
  case 4: if(s.seat[x.i]>x.tag){ y.pc=3;y.tag=y.inc=y.i=0; emit(n,L(LCHK)); } else { y.i++; if(y.i==2){ y.i=0;y.tag=0;y.pc=5; emit(n,L(LACC)); } else emit(n,L(LCHK)); } break;
  case 5: n.idm=m;n.idinc=x.inc;n.idleft=0; y.pc=6; emit(n,L(LID)); break;
  case 6: if(s.fen[0]>=x.inc||s.fen[1]>=x.inc){ if(x.gen<3){ y=J{}; y.gen=x.gen+1; n.lk&=~(1<<m); emit(n,L(LFEN)); } }
     if(s.leaves){ n.leaves--; n.idleft=1; n.idm=m; n.idinc=x.inc; y=J{}; y.gen=x.gen+1; y.pc=9; n.lk&=~(1<<m); emit(n,L(LLEAVE)); } break;
  } 
  if(s.pcr){ S q=s; q.pcr--; q.j[j]=J{}; q.j[j].dead=1; q.j[j].gen=x.gen; q.lk&=~(1<<m); emit(q,L(LPC)); } }
 for(int m=2;m<4;m++){ if(!(s.off>>m&1)&&s.mcr){ S n=s; n.mcr--; n.off|=1<<m; n.lk&=~(1<<m); for(int j=0;j<NJ;j++) if(mach(j)==m){u8 g=s.j[j].gen; n.j[j]=J{}; n.j[j].gen=g; n.j[j].dead=1;} emit(n,LMC*4+m); }
   if((s.off>>m&1)&&s.reb){ S n=s; n.reb--; n.off&=~(1<<m); for(int j=0;j<NJ;j++) if(mach(j)==m&&s.j[j].gen<3){ n.j[j].dead=0; n.j[j].gen++; } emit(n,LREB*4+m); } }
 if(D("naive_claim")) return;
 for(int k=0;k<2;k++){ const M&x=s.m[k]; S n=s; M&y=n.m[k]; auto L=[&](int l){return l*4+k;};
  switch(x.pc){ case 0: if(s.claims){ n.claims--; y=M{}; y.pc=1; emit(n,L(LTO)); } break;
  case 1: if(s.seat[x.i]>x.e)y.e=s.seat[x.i]; y.i++; if(y.i==2){y.i=0; int e=y.e+1; while((e-1)%2!=k)e++; y.e=e;y.pc=2;} emit(n,L(LRS)); break;
  case 2: n.seat[k]=x.e; y.pc=4; emit(n,L(LCL)); break;
  case 4: if(s.bd[x.i].tag>x.a.tag) y.a=s.bd[x.i]; y.i++; if(y.i==2){y.i=0;y.pc=6;} emit(n,L(LCOL)); break;
  case 6: n.bd[k]=x.a; n.bd[k].tag=x.e; y.a=Bd{}; y.pc=7; emit(n,L(LAD)); break;
  case 7: { const Bd&a=s.bd[k];
    for(int b=0;b<NB;b++){ const Bx&q=s.bx[b]; if(!q.m||q.n==a.n) continue; if(q.prev!=(D("prev_is_number")?a.inc:a.n)&&!D("no_prev_match")) continue; if(a.inc>=4) continue; bool ok=false; int l=LRB;
      if(!a.m||a.m==q.m) ok=true; else { bool left=s.idleft&&s.idm==a.m&&s.idinc==a.inc; bool off=s.off>>a.m&1; bool fz=s.fen[0]>=a.inc||s.fen[1]>=a.inc; if(left||off||(D("suspicion_is_proof")&&fz)){ok=true;l=LPROOF;} }
      if(ok){ S t=s; t.m[k].wm=q.m;t.m[k].wn=q.n;t.m[k].pc=8; emit(t,L(l)); } }
    if(s.fences&&a.m&&s.fen[k]<a.inc){ S t=s; t.fences--; t.fen[k]=a.inc; emit(t,L(LSUS)); }
    if(s.seat[1-k]>x.e){ S t=s; t.m[k]=M{}; emit(t,L(LSTEP)); } break; }
  case 8: n.bd[k]={x.e,(u8)(s.bd[k].inc+1),x.wm,x.wn}; y.wm=y.wn=0; y.pc=7; emit(n,L(LBIND)); break; } } }
int main(int c,char**v){ size_t cap=30000000; S s; memset(&s,0,sizeof s); s.claims=2;s.fences=1;s.pcr=0;s.mcr=1;s.reb=1;s.leaves=0;s.retries=0;
 for(int i=1;i<c;i++){ std::string a=v[i]; auto e=a.find('='); std::string k=a.substr(0,e),w=a.substr(e+1); int x=atoi(w.c_str()); if(k=="drop")d.insert(w); else if(k=="claims")s.claims=x; else if(k=="fences")s.fences=x; else if(k=="pcr")s.pcr=x; else if(k=="mcr")s.mcr=x; else if(k=="reb")s.reb=x; else if(k=="leaves")s.leaves=x; else if(k=="retries")s.retries=x; else if(k=="nb")NB=x; else if(k=="dirty"){ s.idm=3;s.idinc=1; s.bd[0]={1,1,3,99}; s.seat[0]=1; s.off=x==2?8:0; if(x==2) {s.j[2].dead=1;} } else return 2; }
 Explorer<S> X; auto bad=[&](const S&t){ if(owners(t)>1) return 1; if(D("naive_claim")) return 0; int mx=t.seat[0]>t.seat[1]?t.seat[0]:t.seat[1]; for(int j=0;j<NJ;j++) if(t.j[j].pc==5||t.j[j].pc==6) for(int k=0;k<2;k++) if(t.bd[k].tag==mx&&mx&&t.bd[k].inc>t.j[j].inc) return 2; return 0; };
 int b=X.run(s,[&](const S&t,auto e){gen(t,e);},bad,cap); long live=0; std::vector<long> cnt(32); for(auto&l:X.lab) cnt[l/4]++;
 printf("join %s states=%zu edges=%zu%s accepts=%ld binds=%ld proof=%ld\n",b==1?"VIOLATION two live owners of one slot":b==2?"VIOLATION slot bound anew while its incarnation lives":"ok",X.st.size(),X.edges,X.capped?" CAPPED":"",cnt[LACC],cnt[LBIND],cnt[LPROOF]);
 if(b){ printf("   %zu steps: ",X.trace(X.badAt).size()); for(int l:X.trace(X.badAt)) printf("%s(%d); ",LN[l/4],l%4); puts(""); } }
